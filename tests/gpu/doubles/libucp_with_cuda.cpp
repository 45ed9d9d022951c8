// A UCX that has CUDA: the real one, with the memory of the GPU that is none where that really lies. It refuses what
// the real one would fail at with a GPU: memory of either kind that is registered as the other, pieces of a GPU's
// without their registration, and threads in which CUDA has no context.
#include <dlfcn.h>
#include <ucp/api/ucp.h>

#include <atomic>

#include "memory.h"

extern "C" int cuCtxGetCurrent(void** context);

namespace {

std::atomic<int> registered{0};  // pieces of memory of the GPU, in this process

template <typename Function>
Function* real(const char* name) {
  return reinterpret_cast<Function*>(::dlsym(RTLD_NEXT, name));
}

std::uint64_t number(const void* address) { return reinterpret_cast<std::uint64_t>(address); }

template <typename Address>
Address* at_real(Address* address) {
  return reinterpret_cast<Address*>(double_gpu::real(number(address)));
}

bool has_context() {
  void* context = nullptr;
  return cuCtxGetCurrent(&context) == 0 && context != nullptr;
}

bool can_move(const void* buffer, const ucp_request_param_t* param) {
  if (!double_gpu::holds(number(buffer))) return true;
  return has_context() && (param->op_attr_mask & UCP_OP_ATTR_FIELD_MEMH) != 0 && param->memh != nullptr;
}

}  // namespace

extern "C" {

ucs_status_t ucp_context_query(ucp_context_h context, ucp_context_attr_t* attributes) {
  const auto status = real<decltype(ucp_context_query)>("ucp_context_query")(context, attributes);
  if ((attributes->field_mask & UCP_ATTR_FIELD_MEMORY_TYPES) != 0)
    attributes->memory_types |= UCS_BIT(UCS_MEMORY_TYPE_CUDA);
  return status;
}

ucs_status_t ucp_mem_map(ucp_context_h context, const ucp_mem_map_params_t* params, ucp_mem_h* handle) {
  ucp_mem_map_params_t in_truth = *params;
  const bool as_cuda =
      (params->field_mask & UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE) != 0 && params->memory_type == UCS_MEMORY_TYPE_CUDA;
  const bool is_cuda = double_gpu::holds(number(params->address));
  if (as_cuda != is_cuda) return UCS_ERR_INVALID_PARAM;
  in_truth.field_mask &= ~static_cast<std::uint64_t>(UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE);
  in_truth.address = at_real(params->address);
  const auto status = real<decltype(ucp_mem_map)>("ucp_mem_map")(context, &in_truth, handle);
  if (is_cuda && status == UCS_OK) ++registered;
  return status;
}

ucs_status_t ucp_mem_unmap(ucp_context_h context, ucp_mem_h handle) {
  ucp_mem_attr_t attributes{};
  attributes.field_mask = UCP_MEM_ATTR_FIELD_ADDRESS;
  ucp_mem_query(handle, &attributes);
  if (double_gpu::holds(number(attributes.address) - double_gpu::distance)) --registered;
  return real<decltype(ucp_mem_unmap)>("ucp_mem_unmap")(context, handle);
}

ucs_status_t ucp_ep_rkey_unpack(ucp_ep_h endpoint, const void* packed, ucp_rkey_h* key) {
  if (registered > 0 && !has_context()) return UCS_ERR_NO_DEVICE;
  return real<decltype(ucp_ep_rkey_unpack)>("ucp_ep_rkey_unpack")(endpoint, packed, key);
}

ucs_status_ptr_t ucp_put_nbx(ucp_ep_h endpoint, const void* buffer, size_t bytes, uint64_t to, ucp_rkey_h key,
                             const ucp_request_param_t* param) {
  static auto* const put = real<decltype(ucp_put_nbx)>("ucp_put_nbx");
  if (!can_move(buffer, param)) return UCS_STATUS_PTR(UCS_ERR_INVALID_PARAM);
  return put(endpoint, at_real(buffer), bytes, double_gpu::real(to), key, param);
}

ucs_status_ptr_t ucp_get_nbx(ucp_ep_h endpoint, void* buffer, size_t bytes, uint64_t from, ucp_rkey_h key,
                             const ucp_request_param_t* param) {
  static auto* const get = real<decltype(ucp_get_nbx)>("ucp_get_nbx");
  if (!can_move(buffer, param)) return UCS_STATUS_PTR(UCS_ERR_INVALID_PARAM);
  return get(endpoint, at_real(buffer), bytes, double_gpu::real(from), key, param);
}
}
