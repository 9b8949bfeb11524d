// tileloss_plan_describe: a plan in words.
#pragma once

#include <tileloss/tileloss.h>

#include <cstddef>

#include "schema/status.h"

namespace tileloss::impl::api {

Status describe(const tileloss_plan* plan, tileloss_text_format format, char* text, std::size_t capacity, std::size_t* needed);

}  // namespace tileloss::impl::api
