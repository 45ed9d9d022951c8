#include "backends/ucx/context.h"

#include <algorithm>
#include <cstdlib>
#include <string>

#include "backend/error.h"

namespace kvxfer::ucx {

UcpContext::UcpContext(const Library& library, Errors errors) : library_(library) {
  ucp_config_t* config = nullptr;
  if (const auto status = library_.ucp_config_read(nullptr, nullptr, &config); status != UCS_OK)
    throw Error(Fault::usage, why("UCX does not understand its environment variables (UCX_…)", status));
  // A listener may otherwise find the port of one before it busy.
  set(config, "TCP_CM_REUSEADDR", "y");
  set(config, "RDMA_CM_REUSEADDR", "y");
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
                why("UCX finds nothing to move data with (see UCX_TLS and UCX_NET_DEVICES)", status));
}

UcpContext::~UcpContext() {
  for (const Pool& one : pools_) library_.ucp_mem_unmap(context_, one.handle);
  library_.ucp_cleanup(context_);
}

// What the user has said in the environment stays.
void UcpContext::set(ucp_config_t* config, const char* name, const char* value) const {
  if (std::getenv((std::string("UCX_") + name).c_str()) == nullptr) library_.ucp_config_modify(config, name, value);
}

std::vector<Pool> UcpContext::pools() const {
  const std::lock_guard lock(mutex_);
  return pools_;
}

Pool UcpContext::map(std::byte* address, std::uint64_t bytes) {
  if (address != nullptr)
    if (const auto known = find(address, bytes)) return pools()[*known];
  ucp_mem_map_params_t params{};
  params.field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH | UCP_MEM_MAP_PARAM_FIELD_FLAGS;
  params.address = address;
  params.length = bytes;
  params.flags = address == nullptr ? unsigned{UCP_MEM_MAP_ALLOCATE} : 0U;
  Pool made{reinterpret_cast<std::uint64_t>(address), bytes, nullptr};
  if (const auto status = library_.ucp_mem_map(context_, &params, &made.handle); status != UCS_OK)
    throw Error(Fault::unavailable, why("UCX cannot register " + std::to_string(bytes) +
                                            " bytes of memory (RDMA pins it: `ulimit -l` bounds how much)",
                                        status));
  if (address == nullptr) {
    ucp_mem_attr_t attributes{};
    attributes.field_mask = UCP_MEM_ATTR_FIELD_ADDRESS;
    library_.ucp_mem_query(made.handle, &attributes);
    made.address = reinterpret_cast<std::uint64_t>(attributes.address);
  }
  const std::lock_guard lock(mutex_);
  pools_.push_back(made);
  return made;
}

std::optional<std::size_t> UcpContext::find(const std::byte* address, std::uint64_t bytes) const {
  const std::lock_guard lock(mutex_);
  std::size_t at = 0;
  if (holding(pools_, at, reinterpret_cast<std::uint64_t>(address), bytes) == nullptr) return std::nullopt;
  return at;
}

PoolKey UcpContext::key(std::size_t number) const {
  const Pool pool = pools()[number];
  void* packed = nullptr;
  std::size_t bytes = 0;
  if (const auto status = library_.ucp_rkey_pack(context_, pool.handle, &packed, &bytes); status != UCS_OK)
    throw Error(Fault::unavailable, why("UCX has no key for the peer", status));
  PoolKey key{static_cast<std::uint32_t>(number), pool.address, pool.bytes,
              std::string(static_cast<const char*>(packed), bytes)};
  library_.ucp_rkey_buffer_release(packed);
  return key;
}

}  // namespace kvxfer::ucx
