// The least that moving pieces over UCP takes: one thread, one worker, one endpoint; puts or gets of the pieces with a
// bounded number under way, then a flush. No queue, no lock, no notices. The other side lets UCX work meanwhile.
#include <poll.h>
#include <time.h>
#include <ucp/api/ucp.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>

namespace {

constexpr unsigned end_of_request = 1;

ucp_context_h context = nullptr;
ucp_worker_h worker = nullptr;
ucp_ep_h endpoint = nullptr;
ucp_mem_h memory = nullptr;
ucp_rkey_h key = nullptr;
bool polls = false;
int events = -1;
std::uint32_t window = 0;
std::uint32_t under_way = 0;
std::size_t ended = 0;  // requests of which the other side has said that they are over

std::int64_t now_ns() {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1'000'000'000 + now.tv_nsec;
}

[[noreturn]] void give_up(const char* what, const char* why) {
  std::fprintf(stderr, "%s: %s\n", what, why);
  std::exit(1);
}

void need(ucs_status_t status, const char* what) {
  if (status != UCS_OK) give_up(what, ucs_status_string(status));
}

// Lets UCX work; sleeps while it has nothing to do, unless this side polls.
void progress() {
  if (ucp_worker_progress(worker) != 0 || polls || ucp_worker_arm(worker) != UCS_OK) return;
  pollfd watched{events, POLLIN, 0};
  ::poll(&watched, 1, -1);
}

void wait_for(ucs_status_ptr_t request, const char* what) {
  if (request == nullptr) return;
  if (UCS_PTR_IS_ERR(request)) need(UCS_PTR_STATUS(request), what);
  while (ucp_request_check_status(request) == UCS_INPROGRESS) progress();
  const ucs_status_t status = ucp_request_check_status(request);
  ucp_request_free(request);
  need(status, what);
}

void flush() {
  const ucp_request_param_t plain{};
  wait_for(ucp_ep_flush_nbx(endpoint, &plain), "flush");
}

void tell_the_end() {
  const ucp_request_param_t plain{};
  const char byte = 0;
  wait_for(ucp_am_send_nbx(endpoint, end_of_request, &byte, sizeof byte, nullptr, 0, &plain), "message");
}

ucs_status_t on_end(void*, const void*, std::size_t, void*, std::size_t, const ucp_am_recv_param_t*) {
  ++ended;
  return UCS_OK;
}

void on_moved(void* request, ucs_status_t status, void*) {
  need(status, "moving a piece");
  --under_way;
  ucp_request_free(request);
}

void move_pieces(bool puts, const std::uint64_t* here, const std::uint64_t* there, const std::uint64_t* lengths,
                 std::size_t count) {
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_MEMH;
  param.cb.send = on_moved;
  param.memh = memory;
  for (std::size_t i = 0; i < count; ++i) {
    while (under_way >= window) progress();
    auto* const at = reinterpret_cast<void*>(here[i]);
    const ucs_status_ptr_t request = puts ? ucp_put_nbx(endpoint, at, lengths[i], there[i], key, &param)
                                          : ucp_get_nbx(endpoint, at, lengths[i], there[i], key, &param);
    if (UCS_PTR_IS_ERR(request)) need(UCS_PTR_STATUS(request), "moving a piece");
    if (request != nullptr) ++under_way;
  }
  while (under_way > 0) progress();
  if (puts) flush();  // until every byte is in place there
}

}  // namespace

extern "C" {

void bare_open(bool polling, std::uint32_t most_under_way) {
  polls = polling;
  window = most_under_way;
  ucp_config_t* config = nullptr;
  need(ucp_config_read(nullptr, nullptr, &config), "configuration");
  ucp_params_t params{};
  params.field_mask = UCP_PARAM_FIELD_FEATURES;
  params.features = UCP_FEATURE_RMA | UCP_FEATURE_AM | (polls ? 0 : UCP_FEATURE_WAKEUP);
  need(ucp_init(&params, config, &context), "context");
  ucp_config_release(config);
  ucp_worker_params_t how{};
  how.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
  how.thread_mode = UCS_THREAD_MODE_SINGLE;
  need(ucp_worker_create(context, &how, &worker), "worker");
  if (!polls) need(ucp_worker_get_efd(worker, &events), "event descriptor");
  ucp_am_handler_param_t handler{};
  handler.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB;
  handler.id = end_of_request;
  handler.cb = on_end;
  need(ucp_worker_set_am_recv_handler(worker, &handler), "receiver of messages");
}

// This side's pool; at address 0 UCX allocates it. Returns its address.
std::uint64_t bare_pool(std::uint64_t address, std::size_t bytes) {
  ucp_mem_map_params_t params{};
  params.field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH | UCP_MEM_MAP_PARAM_FIELD_FLAGS;
  params.address = reinterpret_cast<void*>(address);
  params.length = bytes;
  params.flags = address == 0 ? UCP_MEM_MAP_ALLOCATE : 0;
  need(ucp_mem_map(context, &params, &memory), "memory");
  ucp_mem_attr_t attributes{};
  attributes.field_mask = UCP_MEM_ATTR_FIELD_ADDRESS;
  need(ucp_mem_query(memory, &attributes), "address of the memory");
  return reinterpret_cast<std::uint64_t>(attributes.address);
}

// The worker's address and the pool's key, which stay as they are. Returns the bytes of either.
std::size_t bare_address(const void** at) {
  ucp_address_t* address = nullptr;
  std::size_t bytes = 0;
  need(ucp_worker_get_address(worker, &address, &bytes), "address");
  *at = address;
  return bytes;
}

std::size_t bare_key(const void** at) {
  void* packed = nullptr;
  std::size_t bytes = 0;
  need(ucp_rkey_pack(context, memory, &packed, &bytes), "key");
  *at = packed;
  return bytes;
}

// The side that moves; the other one serves one request meanwhile.
void bare_connect(const void* address, const void* packed) {
  // Without an eye on the peer: UCX 1.22 would make its puts of messages then, where it connects by an address.
  ucp_ep_params_t params{};
  params.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS;
  params.address = static_cast<const ucp_address_t*>(address);
  need(ucp_ep_create(worker, &params, &endpoint), "endpoint");
  flush();
  need(ucp_ep_rkey_unpack(endpoint, packed, &key), "the other side's key");
  tell_the_end();
}

// Moves `requests` requests one after another; request i has `count` pieces from [i * count] on. ns[i] is the time from
// the first piece posted until all are in place.
void bare_move(bool puts, const std::uint64_t* here, const std::uint64_t* there, const std::uint64_t* lengths,
               std::size_t count, std::size_t requests, std::int64_t* ns) {
  for (std::size_t r = 0; r < requests; ++r) {
    const std::int64_t began = now_ns();
    move_pieces(puts, here + r * count, there + r * count, lengths + r * count, count);
    ns[r] = now_ns() - began;
    tell_the_end();
  }
}

// The other side: until so many requests are over.
void bare_serve(std::size_t requests) {
  for (const std::size_t wanted = ended + requests; ended < wanted;) progress();
}
}
