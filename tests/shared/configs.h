// Gradcheck's configs for tests: the repository's own, which the build has turned into JSON, or a line of settings; and the
// tensors of a safetensors file.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "judge/inputs/config.h"
#include "support/tensor_file.h"

namespace tileloss::tools {

// Settings, each "a.b=value": the value a word or a list, "[a, b]".
using Sets = std::vector<std::string>;
Sets joined(Sets sets, const Sets& more);

// `config`: a file of configs/, "gradcheck_logprobs.yaml", or settings between spaces, "loss=logprobs dtype=fp32".
ConfigNode config_tree(const std::string& config, const Sets& sets = {});
// With the tensors that it names: of `files`, by their names, or else from the disk.
GradcheckConfig config_of(const std::string& config, const Sets& sets = {}, std::vector<TensorFile> files = {});

// The files of configs/ that are gradcheck's, but for those of whole models, which the command of Python reads.
Sets config_names();

// Trusts the file.
TensorFile read_tensors(const std::filesystem::path& path);

// The values must outlive it.
template <class T>
StoredTensor stored(const std::string& name, const std::string& dtype, std::vector<int64_t> shape, const std::vector<T>& values) {
  const auto* data = reinterpret_cast<const char*>(values.data());
  return {name, dtype, std::move(shape), static_cast<int64_t>(values.size() * sizeof(T)), data};
}

}  // namespace tileloss::tools
