#include "backends/ucx/context.h"

#include <algorithm>
#include <cstdlib>
#include <string>

#include "backend/error.h"
#include "backends/ucx/cuda.h"
#include "backends/ucx/transport.h"

namespace kvxfer::ucx {

namespace {

// The first that has no CUDA context set in each thread that it works in. Those before 1.16 put and got CUDA memory as
// if the CPU could read it.
constexpr unsigned least_minor_for_cuda = 19;

}  // namespace

UcpContext::UcpContext(const Library& library, Errors errors) : library_(library) {
  ucp_config_t* config = nullptr;
  if (const auto status = library_.ucp_config_read(nullptr, nullptr, &config); status != UCS_OK)
    throw Error(
        Fault::usage,
        why("UCX does not understand its environment variables (UCX_…; UCX_LOG_LEVEL=error says which)", status));
  // A listener may otherwise find the port of one before it busy.
  set(config, "TCP_CM_REUSEADDR", "y");
  set(config, "RDMA_CM_REUSEADDR", "y");
  // Pieces that one progress of UCX copies by cma. Its default of one asks the sockets for news after each.
  set(config, "CMA_TX_QUOTA", "8");
  // Of several interfaces only that of the data address: UCX would divide the bytes among all of them. Not where shared
  // memory is wanted, which belongs to none; nor where RDMA has to be wired up over TCP.
  const bool same_device = errors == Errors::peer && (library_.has("rdmacm") || !library_.has("ib"));
  if (same_device) set(config, "CM_USE_ALL_DEVICES", "n");
  ucp_params_t params{};
  params.field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_MT_WORKERS_SHARED;
  params.features = UCP_FEATURE_RMA | UCP_FEATURE_AM | UCP_FEATURE_WAKEUP;
  params.mt_workers_shared = 1;
  const auto status =
      library_.ucp_init_version(std::min<unsigned>(UCP_API_MAJOR, library_.major),
                                std::min<unsigned>(UCP_API_MINOR, library_.minor), &params, config, &context_);
  library_.ucp_config_release(config);
  if (status != UCS_OK)
    throw Error(Fault::unavailable,
                why("UCX finds nothing to move data with (see UCX_TLS and UCX_NET_DEVICES; it has " +
                        library_.transports() + ")",
                    status));
  why_no_cuda_ = find_cuda();
}

UcpContext::~UcpContext() {
  for (const Pool& one : pools_)
    if (one.handle != nullptr) library_.ucp_mem_unmap(context_, one.handle);
  library_.ucp_cleanup(context_);
}

// What the user has said in the environment stays.
void UcpContext::set(ucp_config_t* config, const char* name, const char* value) const {
  if (std::getenv((std::string("UCX_") + name).c_str()) == nullptr) library_.ucp_config_modify(config, name, value);
}

// UCX has looked: it has CUDA memory only where its module could be loaded, which is linked to the driver's libraries,
// where the driver has a device for it, and where UCX_TLS lets it. Whatever of that is missing, it would take such
// memory for the CPU's.
std::string UcpContext::find_cuda() const {
  if (!library_.has("cuda"))
    return "the UCX in use, " + library_.path +
           ", was built without CUDA: pip install libucx-cu12 brings one with it, KVXFER_UCX_LIBRARY names another";
  if (library_.minor < least_minor_for_cuda)
    return library_.path + " is UCX " + library_.version +
           ", and CUDA memory takes 1.19: pip install libucx-cu12, or " + "name a later one by KVXFER_UCX_LIBRARY";
  ucp_context_attr_t attributes{};
  attributes.field_mask = UCP_ATTR_FIELD_MEMORY_TYPES;
  const bool told = library_.ucp_context_query(context_, &attributes) == UCS_OK;
  if (told && (attributes.memory_types & UCS_BIT(UCS_MEMORY_TYPE_CUDA)) != 0) return {};
  return "UCX finds no GPU whose CUDA memory it could move: that takes NVIDIA's driver with libcuda.so.1 and "
         "libnvidia-ml.so.1, a device that this process may use, and cuda_copy in UCX_TLS where that is set";
}

void UcpContext::require_cuda() const {
  if (!has_cuda()) throw Error(Fault::unavailable, why_no_cuda_);
}

void UcpContext::remember(std::byte* address, std::uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  pools_.push_back({reinterpret_cast<std::uint64_t>(address), bytes});
}

void UcpContext::map(std::byte* address, std::uint64_t bytes, MemoryKind kind) {
  void* const cuda = kind == MemoryKind::cuda ? cuda_context_of(address, bytes) : nullptr;
  if (const auto known = find(address, bytes)) {
    const MemoryKind before = registered(*known).kind;
    if (before != kind)
      throw Error(Fault::usage, std::string("this memory is registered as ") + name_of(before) + " memory already");
    return;
  }
  const auto at = reinterpret_cast<std::uint64_t>(address);
  const Pool made{at, bytes, map_now(at, bytes, 0, kind), kind};
  const std::lock_guard lock(mutex_);
  pools_.push_back(made);
  if (cuda_ == nullptr) cuda_ = cuda;
}

Pool UcpContext::allocate(std::uint64_t bytes) {
  Pool made{0, bytes, map_now(0, bytes, UCP_MEM_MAP_ALLOCATE)};
  ucp_mem_attr_t attributes{};
  attributes.field_mask = UCP_MEM_ATTR_FIELD_ADDRESS;
  if (const auto status = library_.ucp_mem_query(made.handle, &attributes); status != UCS_OK) {
    library_.ucp_mem_unmap(context_, made.handle);
    throw Error(Fault::unavailable, why("UCX does not tell where the memory is that it allocated", status));
  }
  made.address = reinterpret_cast<std::uint64_t>(attributes.address);
  const std::lock_guard lock(mutex_);
  pools_.push_back(made);
  return made;
}

std::vector<Pool> UcpContext::pools() {
  std::vector<Pool> all;
  std::size_t count = 0;
  {
    const std::lock_guard lock(mutex_);
    count = pools_.size();
  }
  for (std::size_t number = 0; number < count; ++number) all.push_back(registered(number));
  return all;
}

Pool UcpContext::registered(std::size_t number) {
  const std::lock_guard lock(mutex_);
  Pool& pool = pools_[number];
  if (pool.handle == nullptr) pool.handle = map_now(pool.address, pool.bytes, 0);  // host memory
  return pool;
}

ucp_mem_h UcpContext::map_now(std::uint64_t address, std::uint64_t bytes, unsigned flags, MemoryKind kind) const {
  ucp_mem_map_params_t params{};
  params.field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH | UCP_MEM_MAP_PARAM_FIELD_FLAGS;
  params.address = reinterpret_cast<void*>(address);
  params.length = bytes;
  params.flags = flags;
  if (kind == MemoryKind::cuda) {  // else UCX finds out: which number asks for that depends on its version
    params.field_mask |= UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE;
    params.memory_type = UCS_MEMORY_TYPE_CUDA;
  }
  ucp_mem_h handle = nullptr;
  const char* const what = flags == UCP_MEM_MAP_ALLOCATE ? "allocate" : "register";
  const char* const bound = flags == UCP_MEM_MAP_ALLOCATE
                                ? "it takes shared memory: `df /dev/shm` says how much there is"
                                : "RDMA pins it: `ulimit -l` bounds how much";
  if (const auto status = library_.ucp_mem_map(context_, &params, &handle); status != UCS_OK)
    throw Error(Fault::unavailable, why(std::string("UCX cannot ") + what + " " + std::to_string(bytes) + " bytes of " +
                                            (kind == MemoryKind::cuda ? "cuda " : "") + "memory (" + bound + ")",
                                        status));
  return handle;
}

std::optional<std::size_t> UcpContext::find(const std::byte* address, std::uint64_t bytes) const {
  const std::lock_guard lock(mutex_);
  std::size_t at = 0;
  if (holding(pools_, at, reinterpret_cast<std::uint64_t>(address), bytes) == nullptr) return std::nullopt;
  return at;
}

PoolKey UcpContext::key(std::size_t number) {
  const Pool pool = registered(number);
  void* packed = nullptr;
  std::size_t bytes = 0;
  if (const auto status = library_.ucp_rkey_pack(context_, pool.handle, &packed, &bytes); status != UCS_OK)
    throw Error(Fault::unavailable, why("UCX has no key for the peer", status));
  PoolKey key{static_cast<std::uint32_t>(number), pool.address, pool.bytes,
              std::string(static_cast<const char*>(packed), bytes)};
  library_.ucp_rkey_buffer_release(packed);
  return key;
}

std::string UcpContext::kinds() const {
  std::string all;
  const std::lock_guard lock(mutex_);
  for (const Pool& pool : pools_) add(all, name_of(pool.kind), ", ");
  return all;
}

void UcpContext::enter_cuda() const {
  void* cuda = nullptr;
  {
    const std::lock_guard lock(mutex_);
    cuda = cuda_;
  }
  if (cuda != nullptr) use_cuda_context(cuda);
}

}  // namespace kvxfer::ucx
