// Counts every operator new of the test binary (allocations.cpp replaces the global ones).
#pragma once

#include <cstdint>

namespace kvxfer::test {

std::uint64_t allocations();

}  // namespace kvxfer::test
