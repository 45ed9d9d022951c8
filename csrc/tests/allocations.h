// Counts every malloc, calloc, realloc and operator new of the test program, whoever calls it; under sanitizers, which
// replace malloc themselves, operator new alone.
#pragma once

#include <cstdint>

namespace kvxfer::test {

std::uint64_t allocations();

// Operator new alone is what C++ allocates with: our own code, and none of a library in C.
enum class Refused { any, by_new };

// The n-th of them from now on, of any thread, is refused, and none after it; 0: none at all. Returns whether the one
// named before was refused.
bool refuse_allocation(std::uint64_t n, Refused which = Refused::any);

}  // namespace kvxfer::test
