#include "backends/ucx/cuda.h"

#include <dlfcn.h>

#include <string>

#include "backend/error.h"

namespace kvxfer::ucx {

namespace {

// As in cuda.h, which is not needed for three functions.
constexpr int success = 0;
constexpr int attribute_context = 1, attribute_memory_type = 2;
constexpr unsigned memory_of_device = 2;

struct Driver {
  int (*cuPointerGetAttribute)(void* into, int attribute, unsigned long long address) = nullptr;
  int (*cuCtxGetCurrent)(void** context) = nullptr;
  int (*cuCtxSetCurrent)(void* context) = nullptr;
};

Driver load() {
  void* const handle = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) throw Error(Fault::unavailable, std::string("no CUDA driver here: ") + ::dlerror());
  Driver found;
  const auto look_up = [&]<typename Function>(Function& function, const char* name) {
    function = reinterpret_cast<Function>(::dlsym(handle, name));
    if (function == nullptr)
      throw Error(Fault::unavailable,
                  std::string("libcuda.so.1 is no CUDA driver that can be used: it has no ") + name);
  };
  look_up(found.cuPointerGetAttribute, "cuPointerGetAttribute");
  look_up(found.cuCtxGetCurrent, "cuCtxGetCurrent");
  look_up(found.cuCtxSetCurrent, "cuCtxSetCurrent");
  return found;
}

const Driver& driver() {
  static const Driver loaded = load();
  return loaded;
}

bool of_device(std::uint64_t address) {
  unsigned type = 0;
  return driver().cuPointerGetAttribute(&type, attribute_memory_type, address) == success && type == memory_of_device;
}

}  // namespace

void* cuda_context_of(const std::byte* address, std::uint64_t bytes) {
  const auto first = reinterpret_cast<std::uint64_t>(address);
  if (!of_device(first) || !of_device(first + bytes - 1))
    throw Error(Fault::usage, "the memory to be registered as cuda memory is not a GPU's, or not all of it");
  void* context = nullptr;
  if (driver().cuPointerGetAttribute(&context, attribute_context, first) == success && context != nullptr)
    return context;
  driver().cuCtxGetCurrent(&context);  // memory of CUDA's virtual memory functions is of no context
  return context;
}

void use_cuda_context(void* context) {
  if (const int code = driver().cuCtxSetCurrent(context); code != success)
    throw Error(Fault::unavailable,
                "CUDA's driver refuses the context of the registered memory (error " + std::to_string(code) + ")");
}

}  // namespace kvxfer::ucx
