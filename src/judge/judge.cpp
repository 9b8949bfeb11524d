// Finds what is asked for; turns every exception into an event and a code.
#include "judge/judge.h"

#include <array>
#include <exception>
#include <map>
#include <mutex>
#include <new>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "judge/requests.h"
#include "oracle/number_formats.h"
#include "support/exit_codes.h"
#include "support/format.h"
#include "support/printable.h"
#include "support/progress.h"

namespace tileloss::tools {
namespace {

using Run = int (*)(Request&);
constexpr std::array<std::pair<const char*, Run>, 7> kRequests{{{"read", request_read},
                                                                {"gradcheck", request_gradcheck},
                                                                {"trace", request_trace},
                                                                {"draw", request_draw},
                                                                {"judge", request_judge},
                                                                {"bench", request_bench},
                                                                {"info", request_info}}};

Run find_request(const Json& json) {
  const auto name = json.at("do").get<std::string>();
  for (const auto& [known, run] : kRequests) {
    if (name == known) return run;
  }
  throw ToolError(kExitUsage, formatted("no request '{}'", shown(name)));
}

int64_t element_bytes(std::string_view dtype) {
  static const std::map<std::string_view, int64_t> kBytes = {{"F32", 4}, {"BF16", 2}, {"F16", 2}, {"I64", 8},
                                                             {"I32", 4}, {"U8", 1},   {"BOOL", 1}};
  const auto found = kBytes.find(dtype);
  return found == kBytes.end() ? 0 : found->second;  // of others no byte is read
}

StoredTensor stored(const tileloss_judge_tensor& given) {
  StoredTensor tensor{given.name, given.dtype, {given.shape, given.shape + given.rank}, 0, static_cast<const char*>(given.data)};
  tensor.bytes = tensor.elements() * element_bytes(tensor.dtype);
  return tensor;
}

Request make_request(const Json& json, const tileloss_judge_tensor* tensors, int64_t count, const tileloss_judge_answer& answer) {
  std::vector<std::pair<std::string, std::vector<StoredTensor>>> files;  // in the order given
  std::vector<StoredTensor> outputs;
  for (int64_t i = 0; i < count; ++i) {
    const std::string file = tensors[i].file;
    if (file.empty()) {
      outputs.push_back(stored(tensors[i]));
      continue;
    }
    if (files.empty() || files.back().first != file) files.emplace_back(file, std::vector<StoredTensor>());
    files.back().second.push_back(stored(tensors[i]));
  }
  Request request{json, {}, {json.value("outputs", "outputs"), std::move(outputs)}, {}, {}};
  for (auto& [name, held] : files) request.files.emplace_back(name, std::move(held));
  request.tell = [&answer](const Json& event) {
    answer.event(answer.context, event.dump(-1, ' ', false, Json::error_handler_t::replace).c_str());
  };
  request.hand_over = [&answer](const StoredTensor& tensor) {
    const tileloss_judge_tensor given{
        "", tensor.name.c_str(), tensor.dtype.c_str(), tensor.shape.data(), std::ssize(tensor.shape), tensor.data};
    answer.tensor(answer.context, &given);
  };
  return request;
}

int run(const char* text, const tileloss_judge_tensor* tensors, int64_t count, const tileloss_judge_answer& answer) {
  const Json json = Json::parse(text);
  Request request = make_request(json, tensors, count, answer);
  const ProgressTo told([&](const char* work, int64_t done, int64_t total) {
    request.tell({{"event", "progress"}, {"work", work}, {"done", done}, {"total", total}});
  });
  return find_request(json)(request);
}

int fail(const tileloss_judge_answer& answer, int code, const char* message, bool out_of_memory = false) {
  const Json event = {{"event", "error"}, {"message", message}, {"out_of_memory", out_of_memory}};
  answer.event(answer.context, event.dump(-1, ' ', false, Json::error_handler_t::replace).c_str());
  return code;
}

}  // namespace
}  // namespace tileloss::tools

int tileloss_judge(const char* request, const tileloss_judge_tensor* tensors, int64_t count,
                   const tileloss_judge_answer* answer) {
  using namespace tileloss::tools;
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  try {
    return run(request, tensors, count, *answer);
  } catch (const OutOfMemory& error) {
    return fail(*answer, error.code(), error.what(), true);
  } catch (const ToolError& error) {
    return fail(*answer, error.code(), error.what());
  } catch (const std::bad_alloc&) {
    return fail(*answer, kExitEnvironment, "out of memory", true);
  } catch (const std::exception& error) {
    return fail(*answer, kExitEnvironment, error.what());
  }
}
