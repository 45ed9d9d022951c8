// What a fuzz program consists of: a target that takes bytes (LLVMFuzzerTestOneInput), and one that changes or makes
// them (LLVMFuzzerCustomMutator). clang's libFuzzer drives both, guided by coverage; driver.cpp does it with any
// compiler, by a seed.
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);
extern "C" std::size_t LLVMFuzzerCustomMutator(std::uint8_t* data, std::size_t size, std::size_t max_size,
                                               unsigned seed);
// Of libFuzzer or of driver.cpp: a change of some bytes.
extern "C" std::size_t LLVMFuzzerMutate(std::uint8_t* data, std::size_t size, std::size_t max_size);
