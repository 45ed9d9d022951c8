#include "backends/ucx/endpoint.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <mutex>
#include <vector>

#include "backend/error.h"

namespace kvxfer::ucx {

namespace {

constexpr unsigned message_id = 1;

struct Abandoned {
  ucp_worker_h worker;
  std::shared_ptr<UcpContext> context;
};

// Destroying what UCX is not done with crashes or hangs: a worker stays as long as the process, and its context with
// it.
void abandon(Abandoned one) {
  static std::mutex mutex;
  static auto* const all = new std::vector<Abandoned>();  // never destroyed
  const std::lock_guard lock(mutex);
  all->push_back(std::move(one));
}

socklen_t length_of(const sockaddr_storage& address) {
  return address.ss_family == AF_INET6 ? sizeof(sockaddr_in6) : sizeof(sockaddr_in);
}

}  // namespace

Endpoint::Endpoint(std::shared_ptr<UcpContext> context, Errors errors, std::uint64_t client_id)
    : context_(std::move(context)),
      library_(context_->library()),
      errors_(errors),
      wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!wake_.open()) throw system_error(Fault::unavailable, "no event descriptor (eventfd)", errno);
  ucp_worker_params_t params{};
  params.field_mask =
      UCP_WORKER_PARAM_FIELD_THREAD_MODE | UCP_WORKER_PARAM_FIELD_EVENTS | UCP_WORKER_PARAM_FIELD_CLIENT_ID;
  params.thread_mode = UCS_THREAD_MODE_SERIALIZED;
  params.events = UCP_WAKEUP_RMA | UCP_WAKEUP_TX | UCP_WAKEUP_RX | UCP_WAKEUP_AMO;
  params.client_id = client_id;
  ucs_status_t created = UCS_OK;
  doors_ = listeners_of([&] { created = library_.ucp_worker_create(context_->get(), &params, &worker_); });
  if (created != UCS_OK) throw Error(Fault::unavailable, why("UCX has no worker for us", created));
  if (const auto status = library_.ucp_worker_get_efd(worker_, &events_); status != UCS_OK) {
    library_.ucp_worker_destroy(worker_);
    throw Error(Fault::unavailable, why("UCX has no event descriptor for us", status));
  }
}

Endpoint::~Endpoint() { destroy(); }

void Endpoint::destroy() {
  if (worker_ == nullptr) return;
  if (endpoint_ != nullptr) close(true, Deadline::after(1'000'000'000));
  if (flush_ != nullptr && !UCS_PTR_IS_ERR(flush_)) library_.ucp_request_free(flush_);
  flush_ = nullptr;
  if (abandoned_) {
    admit_nobody();
    abandon({worker_, context_});
  } else {
    stop_listening();
    library_.ucp_worker_destroy(worker_);
  }
  worker_ = nullptr;
  context_.reset();
}

// --- wire-up ---------------------------------------------------------------------------------------------------------

void Endpoint::on_request(ucp_conn_request_h request, void* self) {
  auto& mine = *static_cast<Endpoint*>(self);
  ucp_conn_request_attr_t attributes{};
  attributes.field_mask = UCP_CONN_REQUEST_ATTR_FIELD_CLIENT_ID;
  const auto status = mine.library_.ucp_conn_request_query(request, &attributes);
  if (status != UCS_OK || attributes.client_id != mine.admitted_ || mine.endpoint_ != nullptr) {
    mine.library_.ucp_listener_reject(mine.listener_, request);
    return;
  }
  ucp_ep_params_t params{};
  params.field_mask = UCP_EP_PARAM_FIELD_CONN_REQUEST;
  params.conn_request = request;
  mine.create(params);
}

std::optional<std::uint16_t> Endpoint::listen(sockaddr_storage address, std::uint64_t admitted) {
  admitted_ = admitted;
  ucp_listener_params_t params{};
  params.field_mask = UCP_LISTENER_PARAM_FIELD_SOCK_ADDR | UCP_LISTENER_PARAM_FIELD_CONN_HANDLER;
  params.sockaddr.addr = reinterpret_cast<const sockaddr*>(&address);
  params.sockaddr.addrlen = length_of(address);
  params.conn_handler = {on_request, this};
  const auto created = library_.ucp_listener_create(worker_, &params, &listener_);
  if (created == UCS_ERR_BUSY) return std::nullopt;
  if (created != UCS_OK) throw Error(Fault::unavailable, why("UCX cannot listen on the data address", created));
  ucp_listener_attr_t attributes{};
  attributes.field_mask = UCP_LISTENER_ATTR_FIELD_SOCKADDR;
  if (const auto status = library_.ucp_listener_query(listener_, &attributes); status != UCS_OK)
    throw Error(Fault::unavailable, why("UCX does not tell its port", status));
  return attributes.sockaddr.ss_family == AF_INET6
             ? ntohs(reinterpret_cast<const sockaddr_in6&>(attributes.sockaddr).sin6_port)
             : ntohs(reinterpret_cast<const sockaddr_in&>(attributes.sockaddr).sin_port);
}

void Endpoint::stop_listening() {
  if (listener_ != nullptr) library_.ucp_listener_destroy(listener_);
  listener_ = nullptr;
}

void Endpoint::connect(const sockaddr_storage& address) {
  ucp_ep_params_t params{};
  params.field_mask = UCP_EP_PARAM_FIELD_FLAGS | UCP_EP_PARAM_FIELD_SOCK_ADDR;
  params.flags = UCP_EP_PARAMS_FLAGS_CLIENT_SERVER | UCP_EP_PARAMS_FLAGS_SEND_CLIENT_ID;
  params.sockaddr.addr = reinterpret_cast<const sockaddr*>(&address);
  params.sockaddr.addrlen = length_of(address);
  create(params);
}

void Endpoint::create(ucp_ep_params_t& params) {
  params.field_mask |= UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE | UCP_EP_PARAM_FIELD_ERR_HANDLER;
  params.err_mode = errors_ == Errors::peer ? UCP_ERR_HANDLING_MODE_PEER : UCP_ERR_HANDLING_MODE_NONE;
  params.err_handler = {on_error, this};
  if (const auto status = library_.ucp_ep_create(worker_, &params, &endpoint_); status != UCS_OK) {
    endpoint_ = nullptr;
    fail(status);
  }
}

void Endpoint::on_error(void* self, ucp_ep_h, ucs_status_t status) { static_cast<Endpoint*>(self)->fail(status); }

void Endpoint::begin_flush() {
  const ucp_request_param_t param{};
  if (status_ == UCS_OK) flush_ = library_.ucp_ep_flush_nbx(endpoint_, &param);
}

bool Endpoint::flushed() {
  if (flush_ == nullptr) return true;
  if (UCS_PTR_IS_ERR(flush_)) {
    fail(UCS_PTR_STATUS(flush_));
    flush_ = nullptr;
    return true;
  }
  const auto status = library_.ucp_request_check_status(flush_);
  if (status == UCS_INPROGRESS) return false;
  library_.ucp_request_free(flush_);
  flush_ = nullptr;
  if (status != UCS_OK) fail(status);
  return true;
}

// --- messages --------------------------------------------------------------------------------------------------------

void Endpoint::receive_with(Received received, void* whose) {
  received_ = received;
  whose_ = whose;
  ucp_am_handler_param_t param{};
  param.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_FLAGS | UCP_AM_HANDLER_PARAM_FIELD_CB |
                     UCP_AM_HANDLER_PARAM_FIELD_ARG;
  param.id = message_id;
  param.flags = UCP_AM_FLAG_WHOLE_MSG;
  param.cb = on_message;
  param.arg = this;
  if (const auto status = library_.ucp_worker_set_am_recv_handler(worker_, &param); status != UCS_OK)
    throw Error(Fault::unavailable, why("UCX takes no receiver of messages", status));
}

ucs_status_t Endpoint::on_message(void* self, const void* head, std::size_t head_bytes, void* data, std::size_t bytes,
                                  const ucp_am_recv_param_t* param) {
  auto& mine = *static_cast<Endpoint*>(self);
  // Our own are sent eagerly, so a rendezvous is none of ours: nothing is taken of it.
  const bool here = (param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV) == 0;
  mine.received_(mine.whose_, {static_cast<const std::byte*>(head), here ? head_bytes : 0},
                 {static_cast<const std::byte*>(data), here ? bytes : 0});
  return UCS_OK;
}

// --- waiting ---------------------------------------------------------------------------------------------------------

bool Endpoint::armed() {
  const auto status = library_.ucp_worker_arm(worker_);
  if (status != UCS_OK && status != UCS_ERR_BUSY) fail(status);
  return status == UCS_OK;
}

void Endpoint::await_event(Nanoseconds at_most) {
  pollfd watched[2] = {{events_, POLLIN, 0}, {wake_.fd(), POLLIN, 0}};
  const timespec time{at_most / 1'000'000'000, at_most % 1'000'000'000};
  if (::ppoll(watched, 2, &time, nullptr) > 0 && watched[1].revents != 0) {
    std::uint64_t count = 0;
    [[maybe_unused]] const auto read = ::read(wake_.fd(), &count, sizeof count);
  }
}

void Endpoint::wake() {
  if (!asleep_.exchange(false, std::memory_order_seq_cst)) return;
  const std::uint64_t one = 1;
  [[maybe_unused]] const auto written = ::write(wake_.fd(), &one, sizeof one);
}

bool Endpoint::close(bool by_force, Deadline deadline) {
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
  // UCX closes by force only where it watches its peer; elsewhere what is under way has to come to its end.
  param.flags = by_force && errors_ == Errors::peer ? UCP_EP_CLOSE_FLAG_FORCE : 0;
  ucs_status_ptr_t request = endpoint_ == nullptr ? nullptr : library_.ucp_ep_close_nbx(endpoint_, &param);
  endpoint_ = nullptr;
  if (request == nullptr) return true;
  while (!UCS_PTR_IS_ERR(request)) {
    if (library_.ucp_request_check_status(request) != UCS_INPROGRESS) {
      library_.ucp_request_free(request);
      return true;
    }
    if (deadline.passed()) break;
    if (!progress()) sleep(1'000'000, [] { return true; });
  }
  abandoned_ = true;
  return false;
}

}  // namespace kvxfer::ucx
