// Counts every malloc, calloc, realloc and operator new of the test program, whoever calls it; under sanitizers, which
// replace malloc themselves, operator new alone.
#pragma once

#include <cstdint>

namespace kvxfer::test {

std::uint64_t allocations();

}  // namespace kvxfer::test
