// One UCP worker and its endpoint to one peer. Everything but wake() is for one thread at a time: a worker is no faster
// when several use it.
#pragma once

#include <netinet/in.h>
#include <ucp/api/ucp.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "backend/clock.h"
#include "backend/lane.h"
#include "backends/ucx/context.h"
#include "backends/ucx/ports.h"

namespace kvxfer::ucx {

using Received = void (*)(void* whose, std::span<const std::byte> head, std::span<const std::byte> rest);

class Endpoint {
 public:
  // Throws Error(unavailable). `client_id`: tells the peer's listener that it is us, where this side connects.
  Endpoint(std::shared_ptr<UcpContext> context, Errors errors, std::uint64_t client_id);
  ~Endpoint();
  Endpoint(const Endpoint&) = delete;
  Endpoint& operator=(const Endpoint&) = delete;

  // Waits for one connection that shows `admitted`; others are refused. Returns the port, or nothing when that of the
  // address is in use. Throws Error(unavailable).
  std::optional<std::uint16_t> listen(sockaddr_storage address, std::uint64_t admitted);
  bool accepted() const { return endpoint_ != nullptr; }
  void stop_listening();
  // Begins; flushed() tells when it is done.
  void connect(const sockaddr_storage& address);
  void begin_flush();
  bool flushed();
  // Once both sides are connected: nobody else gets at UCX.
  void admit_nobody() noexcept { ucx::admit_nobody(doors_); }

  // Messages of the peer come through here, inside progress(). Before any can come.
  void receive_with(Received received, void* whose);

  // True when something happened.
  bool progress() { return library_.ucp_worker_progress(worker_) != 0; }
  // Until something happens here, or wake(), or the time is over. `nothing_to_do` is asked once more when wake() would
  // already be heard.
  template <typename NothingToDo>
  void sleep(Nanoseconds at_most, const NothingToDo& nothing_to_do) {
    asleep_.store(true, std::memory_order_seq_cst);
    if (nothing_to_do() && armed()) await_event(at_most);
    asleep_.store(false, std::memory_order_seq_cst);
  }
  void wake();  // from any thread

  ucp_ep_h get() const { return endpoint_; }
  // UCX_OK while it works.
  ucs_status_t status() const { return status_; }
  void fail(ucs_status_t status) {
    if (status_ == UCS_OK) status_ = status;
  }

  // UCX is not done with what was handed over: destroy() leaves the worker to itself.
  void give_up() { abandoned_ = true; }
  // Ends the worker too; nothing but wake() may be called afterwards.
  void destroy();
  // Ends the endpoint, whatever is under way on it; false when UCX did not get done with it in time. It is left to
  // itself then: destroying it would crash or hang.
  bool close(bool by_force, Deadline deadline);

 private:
  static void on_request(ucp_conn_request_h request, void* self);
  static void on_error(void* self, ucp_ep_h endpoint, ucs_status_t status);
  static ucs_status_t on_message(void* self, const void* header, std::size_t header_bytes, void* data,
                                 std::size_t bytes, const ucp_am_recv_param_t* param);
  void create(ucp_ep_params_t& params);
  bool armed();
  void await_event(Nanoseconds at_most);

  std::shared_ptr<UcpContext> context_;
  const Library& library_;
  const Errors errors_;
  ucp_worker_h worker_ = nullptr;
  ucp_listener_h listener_ = nullptr;
  ucp_ep_h endpoint_ = nullptr;
  ucs_status_ptr_t flush_ = nullptr;
  ucs_status_t status_ = UCS_OK;
  std::uint64_t admitted_ = 0;
  bool abandoned_ = false;
  Received received_ = nullptr;
  void* whose_ = nullptr;
  int events_ = -1;         // the worker's own
  std::vector<int> doors_;  // sockets of the worker on which it takes connections
  Socket wake_;             // an eventfd
  std::atomic<bool> asleep_{false};
};

}  // namespace kvxfer::ucx
