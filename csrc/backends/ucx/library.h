// UCP's functions, from a libucp that is opened at run time: one build runs on machines with any UCX, or none.
#pragma once

#include <ucp/api/ucp.h>

#include <string>
#include <vector>

namespace kvxfer::ucx {

#define KVXFER_UCP_FUNCTIONS(X)     \
  X(ucp_get_version)                \
  X(ucp_get_version_string)         \
  X(ucp_config_read)                \
  X(ucp_config_modify)              \
  X(ucp_config_release)             \
  X(ucp_init_version)               \
  X(ucp_cleanup)                    \
  X(ucp_context_query)              \
  X(ucp_worker_create)              \
  X(ucp_worker_destroy)             \
  X(ucp_worker_progress)            \
  X(ucp_worker_get_efd)             \
  X(ucp_worker_arm)                 \
  X(ucp_worker_set_am_recv_handler) \
  X(ucp_listener_create)            \
  X(ucp_listener_query)             \
  X(ucp_listener_reject)            \
  X(ucp_listener_destroy)           \
  X(ucp_conn_request_query)         \
  X(ucp_ep_create)                  \
  X(ucp_ep_query)                   \
  X(ucp_ep_print_info)              \
  X(ucp_ep_flush_nbx)               \
  X(ucp_ep_close_nbx)               \
  X(ucp_mem_map)                    \
  X(ucp_mem_unmap)                  \
  X(ucp_mem_query)                  \
  X(ucp_rkey_pack)                  \
  X(ucp_rkey_buffer_release)        \
  X(ucp_ep_rkey_unpack)             \
  X(ucp_rkey_destroy)               \
  X(ucp_put_nbx)                    \
  X(ucp_get_nbx)                    \
  X(ucp_am_send_nbx)                \
  X(ucp_request_check_status)       \
  X(ucp_request_query)              \
  X(ucp_request_free)               \
  X(ucs_status_string)

struct Library {
#define KVXFER_UCP_MEMBER(name) decltype(&::name) name = nullptr;
  KVXFER_UCP_FUNCTIONS(KVXFER_UCP_MEMBER)
#undef KVXFER_UCP_MEMBER

  std::string path;     // as the loader knows it
  std::string version;  // 1.22.0
  unsigned major = 0;
  unsigned minor = 0;
  std::vector<std::string> modules;  // transports beside the built-in ones, as they lie beside the library
  std::string warning;               // what nobody should overlook; empty: nothing

  bool has(const std::string& module) const;
  std::string transports() const;
};

// The one of this process: two do not work beside each other. Throws Error(unavailable) when there is none that can be
// used, with what to do about it; once loaded, always the same.
const Library& library();

// "text: what UCX calls the status"
std::string why(const std::string& text, ucs_status_t status);

// Whether this machine has RDMA devices.
bool has_rdma_devices();

}  // namespace kvxfer::ucx
