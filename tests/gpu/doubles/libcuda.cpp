// A CUDA driver for one GPU that is none: what tests/gpu and kvxfer call of it.
#include <sys/mman.h>

#include <cstring>

#include "memory.h"

namespace {

constexpr int success = 0, invalid_value = 1, invalid_context = 201;
constexpr int attribute_context = 1, attribute_memory_type = 2;
constexpr std::uint64_t granularity = std::uint64_t{2} << 20;

char primary;  // the context
thread_local void* current = nullptr;
std::uint64_t used = 0;

bool reserve(std::uint64_t from, int protection) {
  void* const at = reinterpret_cast<void*>(from);
  return ::mmap(at, double_gpu::bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE,
                -1, 0) == at;
}

void* real(std::uint64_t address) { return reinterpret_cast<void*>(double_gpu::real(address)); }

}  // namespace

extern "C" {

int cuInit(unsigned) { return success; }

int cuGetErrorString(int, const char** text) {
  *text = "the double says so";
  return success;
}

int cuDeviceGetCount(int* count) {
  *count = 1;
  return success;
}

int cuDeviceGet(int* device, int) {
  *device = 0;
  return success;
}

int cuDevicePrimaryCtxRetain(void** context, int) {
  *context = &primary;
  return success;
}

int cuCtxSetCurrent(void* context) {
  current = context;
  return success;
}

int cuCtxGetCurrent(void** context) {
  *context = current;
  return success;
}

int cuCtxSynchronize() { return success; }

int cuMemAlloc_v2(std::uint64_t* address, std::size_t bytes) {
  if (current == nullptr) return invalid_context;
  if (used == 0 && (!reserve(double_gpu::begin, PROT_NONE) ||
                    !reserve(double_gpu::begin + double_gpu::distance, PROT_READ | PROT_WRITE)))
    return invalid_value;
  *address = double_gpu::begin + used;
  used += (bytes + granularity - 1) / granularity * granularity;
  return success;
}

int cuMemcpyHtoD_v2(std::uint64_t to, const void* from, std::size_t bytes) {
  std::memcpy(real(to), from, bytes);
  return success;
}

int cuMemcpyDtoH_v2(void* to, std::uint64_t from, std::size_t bytes) {
  std::memcpy(to, real(from), bytes);
  return success;
}

int cuPointerGetAttribute(void* into, int attribute, std::uint64_t address) {
  if (!double_gpu::holds(address) || address - double_gpu::begin >= used) return invalid_value;
  if (attribute == attribute_memory_type) {
    const unsigned of_device = 2;
    std::memcpy(into, &of_device, sizeof of_device);
  } else if (attribute == attribute_context) {
    void* const context = &primary;
    std::memcpy(into, &context, sizeof context);
  } else {
    return invalid_value;
  }
  return success;
}
}
