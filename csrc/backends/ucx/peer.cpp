#include "backends/ucx/peer.h"

#include <algorithm>
#include <cstring>

#include "backends/ucx/transport.h"
#include "backends/ucx/wire_up.h"

namespace kvxfer::ucx {

namespace {

constexpr std::uint64_t largest_chunk = std::uint64_t{1} << 20;
// A request below twice this is not worth waking a second thread for.
constexpr std::uint64_t least_chunk = std::uint64_t{256} << 10;
// Into how many chunks an endpoint's share of a request is cut at least, so that all end at about the same time.
constexpr std::uint64_t chunks_per_endpoint = 4;
constexpr std::size_t pieces_at_once = 64;
// A request names so many ranges at most, or nearly always; for more, room has to be made while data moves.
constexpr std::size_t likely_ranges = 16;
constexpr std::size_t messages_per_batch = 1024;
// When so many wait the peer takes none of them: it is stopped, or does not progress.
constexpr std::size_t most_batches = 64;
// Longer than what movers take to part.
constexpr auto farewell_patience = std::chrono::milliseconds(2500);
constexpr Nanoseconds destroying_patience = 1'000'000'000;
constexpr auto last_word_patience = std::chrono::seconds(1);
// How many ports are looked at beyond a data port that was asked for; the workers of other rows may have some.
constexpr unsigned ports_tried = 256;

std::uint64_t chunk_for(std::uint64_t total, std::size_t endpoints) {
  const std::uint64_t share = total / (chunks_per_endpoint * endpoints);
  return endpoints == 1 || total < 2 * least_chunk ? largest_chunk : std::clamp(share, least_chunk, largest_chunk);
}

}  // namespace

UcxPeer::Mover::Mover(UcxPeer& of, std::size_t its_number, std::uint64_t client_id)
    : peer(of),
      number(its_number),
      endpoint(of.context_, of.settings_.errors, client_id),
      requests(of.settings_.window),
      patience(of.settings_.asking),
      here(pieces_at_once),
      there(pieces_at_once) {
  put_param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_MEMH;
  put_param.cb.send = on_moved;
  flush_param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA;
  flush_param.cb.send = on_flushed;
  touched.reserve(2 * max_inflight);
  kinds.reserve(most_kinds);
  for (Request& request : requests) unused.push_back(&request);
}

UcxPeer::UcxPeer(EventQueue& events, std::uint32_t id, std::vector<Socket> lanes, std::shared_ptr<UcpContext> context,
                 Settings settings)
    : LanePeer(events, id, std::move(lanes)),
      context_(std::move(context)),
      library_(context_->library()),
      settings_(settings),
      transfers_(2 * max_inflight) {
  if (interface_of(lanes_[0].fd()) != "lo") settings_.asking = 0;
  queue_.reserve(transfers_.size());
  for (Transfer& transfer : transfers_) transfer.left.reserve(likely_ranges);
  add_messages();
}

UcxPeer::~UcxPeer() {
  close();
  destroy_endpoints();  // they may call back into what is destroyed before them
}

std::vector<std::string> UcxPeer::describe() const {
  std::vector<std::string> lanes, carried;
  const std::lock_guard lock(mutex_);
  for (const auto& mover : movers_) {
    lanes.push_back(mover->transport);
    if (!mover->carried.empty()) carried.push_back(mover->carried);
  }
  return carried.empty() ? lanes : carried;  // what has moved nothing has carried nothing
}

std::string UcxPeer::protocols() const {
  std::string all;
  const std::lock_guard lock(mutex_);
  for (const auto& mover : movers_)
    if (!mover->how.empty()) add(all, mover->how, ", ");
  return all;
}

// --- wire-up ---------------------------------------------------------------------------------------------------------

void UcxPeer::make_movers(const std::vector<std::uint64_t>& client_ids) {
  std::vector<std::unique_ptr<Mover>> made;
  for (std::size_t i = 0; i < client_ids.size(); ++i) {
    made.push_back(std::make_unique<Mover>(*this, i, client_ids[i]));
  }
  made.front()->endpoint.receive_with(on_message, made.front().get());
  const std::lock_guard lock(mutex_);  // close() alerts them
  movers_ = std::move(made);
  const std::size_t each = movers_.size();
  parts_.resize(transfers_.size() * each);
  for (std::size_t t = 0; t < transfers_.size(); ++t) {
    transfers_[t].parts = {&parts_[t * each], each};
    for (std::size_t i = 0; i < each; ++i) transfers_[t].parts[i] = {&transfers_[t], movers_[i].get()};
  }
}

void UcxPeer::receive_wire_up(void* into, std::size_t bytes, Deadline deadline) {
  if (const int code = receive_until(lanes_[0].fd(), into, bytes, deadline))
    throw system_error(Fault::peer_lost, "the peer did not get done with UCX's wire-up", code);
}

void UcxPeer::progress_until(const std::function<bool()>& done, Deadline deadline) {
  for (;;) {
    bool busy = false;
    for (const auto& mover : movers_) busy |= mover->endpoint.progress();
    const bool over = done();
    for (const auto& mover : movers_)  // what is over may have come to a bad end
      if (const auto status = mover->endpoint.status(); status == UCS_ERR_UNREACHABLE)
        throw Error(
            Fault::unavailable,
            why("UCX has no way to the peer's address: to connect it needs TCP or RDMA on that address's device; do "
                "UCX_TLS and UCX_NET_DEVICES leave it that?",
                status));
      else if (status != UCS_OK)
        throw Error(Fault::peer_lost, why("UCX could not reach the peer", status));
    if (over) return;
    if (deadline.passed())
      throw Error(Fault::peer_lost,
                  "UCX did not reach the peer in time: does a firewall keep it from the ports that "
                  "follow the peer's data port?");
    if (!lost().empty()) throw Error(Fault::peer_lost, "UCX's wire-up was interrupted");
    if (!busy) movers_.front()->endpoint.sleep(1'000'000, [] { return true; });
  }
}

void UcxPeer::wire_up(bool first, Deadline deadline) {
  try {
    if (!(library_.has("rdmacm") && has_rdma_devices())) require_family_of_tcp(self_of(lanes_[0].fd()));
    if (first)
      connect_endpoints(deadline);
    else
      listen_for_endpoints(deadline);
  } catch (...) {
    destroy_endpoints();  // the peer stays with its context; its ports do not
    throw;
  }
  for (const auto& mover : movers_) {
    mover->endpoint.stop_listening();
    mover->endpoint.admit_nobody();
    mover->transport = transport_of(library_, mover->endpoint.get());
  }
}

void UcxPeer::connect_endpoints(Deadline deadline) {
  Offer offer;
  offer.endpoints = settings_.endpoints;
  offer.errors = settings_.errors;
  if (const int code = send_all(lanes_[0].fd(), &offer, sizeof offer))
    throw Error(Fault::peer_lost, "the peer was lost: " + closed_or(code));
  Answer answer;
  receive_wire_up(&answer, sizeof answer, deadline);
  if (answer.magic != Answer{}.magic)
    throw Error(Fault::usage, "the peer does not speak this backend's wire-up: does it run another one?");
  std::vector<EndpointAddress> addresses(offer.endpoints);
  receive_wire_up(addresses.data(), addresses.size() * sizeof addresses[0], deadline);
  std::vector<std::uint64_t> ids;
  for (const EndpointAddress& address : addresses) ids.push_back(address.client_id);
  make_movers(ids);
  const sockaddr_storage host = answer.host_or(peer_of(lanes_[0].fd()));
  for (std::size_t i = 0; i < movers_.size(); ++i) movers_[i]->endpoint.connect(with_port(host, addresses[i].port));
  flush_endpoints(deadline);
  say_ready();
  progress_until([this] { return said_ready(lanes_[0].fd()); }, deadline);
}

// Until UCX has made every connection that it will ever make from this side.
void UcxPeer::flush_endpoints(Deadline deadline) {
  for (const auto& mover : movers_) mover->endpoint.begin_flush();
  progress_until(
      [this] { return std::ranges::all_of(movers_, [](const auto& mover) { return mover->endpoint.flushed(); }); },
      deadline);
}

void UcxPeer::say_ready() {
  if (const int code = send_all(lanes_[0].fd(), &ready_byte, sizeof ready_byte))
    throw Error(Fault::peer_lost, "the peer was lost: " + closed_or(code));
}

void UcxPeer::listen_for_endpoints(Deadline deadline) {
  Offer offer;
  receive_wire_up(&offer, sizeof offer, deadline);
  if (offer.magic != Offer{}.magic || offer.endpoints == 0 || offer.endpoints > most_endpoints ||
      offer.errors > Errors::none)
    throw Error(Fault::usage, "the peer does not speak this backend's wire-up: does it run another one?");
  settings_.endpoints = offer.endpoints;
  settings_.errors = offer.errors;
  std::vector<EndpointAddress> addresses(offer.endpoints);
  make_movers(std::vector<std::uint64_t>(offer.endpoints, 0));
  Answer answer;
  const sockaddr_storage host = answer.choose_host(self_of(lanes_[0].fd()), library_.has("rdmacm"));
  unsigned last = settings_.data_port;
  for (std::size_t i = 0; i < movers_.size(); ++i) {
    addresses[i].client_id = random_id();
    addresses[i].port = listen_from(last + 1, host, movers_[i]->endpoint, addresses[i].client_id);
    last = addresses[i].port;
  }
  iovec parts[2] = {{&answer, sizeof answer}, {addresses.data(), addresses.size() * sizeof addresses[0]}};
  if (const int code = send_vectors(lanes_[0].fd(), parts, 2))
    throw Error(Fault::peer_lost, "the peer was lost: " + closed_or(code));
  progress_until([this] { return said_ready(lanes_[0].fd()); }, deadline);
  progress_until(
      [this] { return std::ranges::all_of(movers_, [](const auto& mover) { return mover->endpoint.accepted(); }); },
      deadline);
  flush_endpoints(deadline);
  say_ready();
}

// On the first free port from there on, so that a firewall may know which; any, where no data port was asked for.
std::uint16_t UcxPeer::listen_from(unsigned first, const sockaddr_storage& host, Endpoint& endpoint,
                                   std::uint64_t client_id) const {
  const bool any = settings_.data_port == 0;
  const unsigned end = any ? 1 : std::min(first + ports_tried, 65536U);
  for (unsigned port = any ? 0 : first; port < end; ++port)
    if (const auto taken = endpoint.listen(with_port(host, static_cast<std::uint16_t>(port)), client_id)) return *taken;
  throw Error(Fault::unavailable,
              "UCX finds no free port to listen on" +
                  (any ? std::string() : " from " + std::to_string(first) + " on, after the data port"));
}

// Of movers that have no thread.
void UcxPeer::destroy_endpoints() {
  const Deadline deadline = Deadline::after(destroying_patience);  // of all
  for (const auto& mover : movers_) mover->endpoint.close(true, deadline);
  for (const auto& mover : movers_) mover->endpoint.destroy();
}

void UcxPeer::start() {
  {
    const std::lock_guard lock(mutex_);
    started_ = true;
  }
  for (const auto& mover : movers_) run([this, one = mover.get()] { move(*one); });
  LanePeer::start();
}

// --- keys and plans --------------------------------------------------------------------------------------------------

// Waits until the mover's thread has done it; what that throws is thrown here.
void UcxPeer::on_thread_of(Mover& mover, std::function<void()> job) {
  std::exception_ptr thrown;
  std::function<void()> guarded = [&] {
    try {
      job();
    } catch (...) {
      thrown = std::current_exception();
    }
  };
  {
    const std::lock_guard lock(mutex_);
    mover.job = &guarded;
  }
  alert(mover);
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return mover.job == nullptr || mover.ended; });
  const bool done = mover.job == nullptr;
  mover.job = nullptr;
  lock.unlock();
  if (!done) throw Error(Fault::peer_lost, "the peer was lost: " + lost());
  if (thrown) std::rethrow_exception(thrown);
}

void UcxPeer::import_keys(const std::string& text) {
  const Keys keys = read(text);
  for (const PoolKey& key : keys.pools) {
    if (std::ranges::find(known_keys_, key) != known_keys_.end()) continue;
    for (const auto& mover : movers_)
      on_thread_of(*mover, [&, to = mover.get()] {
        context_->enter_cuda();
        RemotePool pool{key.address, key.bytes, nullptr};
        const auto status = library_.ucp_ep_rkey_unpack(to->endpoint.get(), key.packed.data(), &pool.key);
        if (status != UCS_OK)
          throw Error(Fault::unavailable,
                      why("UCX cannot reach the peer's memory (do both sides use the same version of UCX?)", status));
        to->remote.push_back(pool);
      });
    known_keys_.push_back(key);
  }
  learn(keys.regions);
}

std::shared_ptr<LanePlan> UcxPeer::prepare(const PlanArrays& arrays, std::span<const Region> regions,
                                           Deadline deadline) {
  require_alive();
  for (const auto& mover : movers_)
    on_thread_of(*mover, [this, to = mover.get()] {
      context_->enter_cuda();  // there may be new memory
      to->local = context_->pools();
    });
  return LanePeer::prepare(arrays, regions, deadline);
}

// --- transfers -------------------------------------------------------------------------------------------------------

bool UcxPeer::wired_up() const {
  const std::lock_guard lock(mutex_);
  return started_;
}

bool UcxPeer::pulls_by_put() const {
  if (settings_.pull != Pull::by_transport) return settings_.pull == Pull::put;
  return movers_.front()->transport.starts_with("tcp");
}

UcxPeer::Transfer* UcxPeer::find(bool mine, Op op, std::uint64_t tag) {
  const auto found = std::ranges::find_if(
      transfers_, [&](const Transfer& t) { return t.open && t.mine == mine && t.op == op && t.tag == tag; });
  return found == transfers_.end() ? nullptr : &*found;
}

UcxPeer::Transfer* UcxPeer::open_transfer(LanePlan& plan, bool mine, Op op, Role role, std::uint64_t tag) {
  Transfer* unused = nullptr;
  std::size_t open = 0;
  for (Transfer& transfer : transfers_) {
    if (transfer.open && transfer.mine == mine) ++open;
    if (!transfer.open && unused == nullptr) unused = &transfer;
  }
  if (open >= max_inflight || unused == nullptr) return nullptr;
  unused->mine = mine;
  unused->op = op;
  unused->role = role;
  unused->tag = tag;
  unused->plan = &plan;
  unused->ready = nullptr;
  unused->cancelling = unused->copied = unused->lost = false;
  unused->next_left = 0;
  unused->total = unused->told = 0;
  unused->done = 0;
  unused->told_at = now_ns();
  unused->parts_open = 0;
  unused->handed_out = false;
  for (Part& part : unused->parts) part.outstanding = 0, part.open = part.flushing = part.flushed = false;
  return unused;
}

void UcxPeer::queue(Transfer& transfer) {
  for (const Range& range : transfer.left) transfer.total += range.to - range.from;
  transfer.chunk_bytes = chunk_for(transfer.total, movers_.size());
  transfer.open = true;
  queue_.push_back(&transfer);
}

void UcxPeer::post(LanePlan& plan, Op op, std::span<const std::uint32_t> segments, std::uint64_t tag,
                   const ReadyFlag* ready) {
  if (op == Op::pull && ready != nullptr)
    throw Error(Fault::usage, "a pull takes no ready flag: the passive side arms it when the data is ready");
  require_alive();
  const Role role = op == Op::pull && pulls_by_put() ? Role::ask : Role::move;
  {
    const std::lock_guard lock(mutex_);
    if (stopping_) throw Error(Fault::peer_lost, "the peer was lost");
    if (find(true, op, tag) != nullptr) throw Error(Fault::usage, "tag " + std::to_string(tag) + " is open already");
    Transfer* const transfer = open_transfer(plan, true, op, role, tag);
    if (transfer == nullptr)
      throw Error(Fault::unavailable, std::to_string(max_inflight) + " transfers are open, the most of this backend");
    plan.ranges(segments, transfer->left);
    transfer->ready = ready;
    if (role == Role::move)
      queue(*transfer);
    else
      transfer->open = true;
  }
  if (role == Role::move) return alert_all();
  Notice request;
  request.kind = NoticeKind::request;
  request.plan = plan.id();
  request.op = op;
  request.tag = tag;
  request.payload_bytes = segments.size_bytes();
  send(request, segments.data(), -1);
}

bool UcxPeer::cancel(std::uint64_t tag) {
  Outcome outcome;
  {
    const std::lock_guard lock(mutex_);
    Transfer* transfer = find(true, Op::push, tag);
    if (transfer == nullptr) transfer = find(true, Op::pull, tag);
    if (transfer == nullptr) return false;
    if (transfer->cancelling) return true;
    if (transfer->role == Role::ask) {
      transfer->cancelling = true;
      outcome.notice = about(*transfer, NoticeKind::cancel_request);
    } else {
      outcome = stop(*transfer);
    }
  }
  perform(outcome);
  alert_all();
  return true;
}

// Hands out nothing more; it ends once nothing of it is under way. Too late when the other side is being told.
UcxPeer::Outcome UcxPeer::stop(Transfer& transfer) {
  if (transfer.copied || transfer.cancelling) return {};
  transfer.cancelling = true;
  transfer.handed_out = true;
  std::erase(queue_, &transfer);
  return transfer.parts_open == 0 ? settle(transfer) : Outcome{};
}

Notice UcxPeer::about(Transfer& transfer, NoticeKind kind) {
  Notice notice;
  notice.kind = kind;
  notice.plan = transfer.plan->id();
  notice.op = transfer.op;
  notice.tag = transfer.tag;
  const std::uint64_t done = transfer.done;
  notice.count = done - transfer.told;
  notice.total = transfer.total;
  transfer.told = done;
  return notice;
}

// Everything has been handed out, and nothing is under way.
UcxPeer::Outcome UcxPeer::settle(Transfer& transfer) {
  if (transfer.lost) return {};
  if (transfer.cancelling) {
    transfer.open = false;
    return {about(transfer, NoticeKind::cancelled), EventKind::cancelled, transfer.tag};
  }
  if (transfer.gets()) {
    transfer.open = false;
    return {about(transfer, NoticeKind::delivered), EventKind::confirmed, transfer.tag};
  }
  transfer.copied = true;
  return {about(transfer, NoticeKind::written), std::nullopt, transfer.tag};
}

void UcxPeer::perform(const Outcome& outcome) {
  const Nanoseconds at = now_ns();  // what happened has happened; saying so to the peer is not part of it
  if (outcome.notice) send(*outcome.notice, nullptr, -1);
  if (outcome.event) emit(*outcome.event, outcome.tag, at);
}

bool UcxPeer::all_ended() const {
  return std::ranges::all_of(movers_, [](const auto& mover) { return mover->ended; });
}

bool UcxPeer::all_gone() const {
  return std::ranges::all_of(movers_, [](const auto& mover) { return mover->gone; });
}

void UcxPeer::end_open_transfers() {
  queue_.clear();
  for (Transfer& transfer : transfers_) {
    transfer.lost = true;
    transfer.handed_out = true;
  }
  end_in_error();
}

// Whoever is told may free the memory: not while UCX may still use it, for this side, or for the other, which goes on
// to put what it was asked for as long as there is an endpoint.
void UcxPeer::end_in_error() {
  const bool moves_over = all_ended(), asked_over = all_gone();
  for (Transfer& transfer : transfers_) {
    if (!transfer.open || !(transfer.role == Role::move ? moves_over : asked_over)) continue;
    transfer.open = false;
    if (transfer.mine) emit_error(transfer.tag);
  }
}

// --- messages --------------------------------------------------------------------------------------------------------

void UcxPeer::add_messages() {
  batches_.push_back(std::make_unique<Message[]>(messages_per_batch));
  for (auto* list : {&unused_, &outgoing_}) list->reserve(batches_.size() * messages_per_batch);
  for (std::size_t i = 0; i < messages_per_batch; ++i) {
    batches_.back()[i].peer = this;
    unused_.push_back(&batches_.back()[i]);
  }
}

bool UcxPeer::enqueue(const Notice& notice, const std::uint32_t* segments) {
  const std::lock_guard lock(messages_mutex_);
  if (unused_.empty() && batches_.size() == most_batches) return false;
  if (unused_.empty()) add_messages();
  Message& message = *unused_.back();
  message.notice = notice;
  message.segments.assign(segments, segments + notice.payload_bytes / sizeof(std::uint32_t));
  unused_.pop_back();
  outgoing_.push_back(&message);
  return true;
}

void UcxPeer::send(const Notice& notice, const void* payload, int) {
  Mover* const own = own_mover();
  if (!enqueue(notice, static_cast<const std::uint32_t*>(payload))) {
    const std::string why = "the peer reads no notices";
    if (own == nullptr) return fail(why);
    if (own->broken.empty()) own->broken = why;  // its thread has to end before the peer may be lost
  } else if (own != movers_.front().get()) {     // which looks for messages before it sleeps
    alert(*movers_.front());
  }
}

void UcxPeer::on_message(void* first, std::span<const std::byte> notice, std::span<const std::byte> segments) {
  Mover& mover = *static_cast<Mover*>(first);
  if (!mover.broken.empty()) return;
  std::string wrong;
  try {
    wrong = mover.peer.take_message(notice, segments);
  } catch (const std::exception& error) {  // UCX, which calls this, is no place for exceptions
    wrong = error.what();
  }
  if (mover.broken.empty()) mover.broken = wrong;  // or it has broken in answering
}

std::string UcxPeer::take_message(std::span<const std::byte> head, std::span<const std::byte> rest) {
  Notice notice;
  if (head.size() != sizeof notice) return "protocol error: no notice where one belongs";
  std::memcpy(&notice, head.data(), sizeof notice);
  if (notice.magic != Notice{}.magic || notice.payload_bytes != rest.size() ||
      rest.size() % sizeof(std::uint32_t) != 0 || rest.size() > max_segments * sizeof(std::uint32_t))
    return "protocol error: no notice where one belongs";
  if (notice.op != Op::push && notice.op != Op::pull) return "protocol error: unknown operation";
  if (!rest.empty() && notice.kind != NoticeKind::request) return "protocol error: a payload where none belongs";
  segments_.resize(rest.size() / sizeof(std::uint32_t));
  if (!rest.empty()) std::memcpy(segments_.data(), rest.data(), rest.size());
  return take(notice, segments_);
}

std::string UcxPeer::handle(const Notice& notice, std::span<const std::uint32_t> segments) {
  switch (notice.kind) {
    case NoticeKind::request:
      return was_asked(notice, segments);
    case NoticeKind::progress:
    case NoticeKind::written:
      return was_written(notice);
    case NoticeKind::delivered:
    case NoticeKind::cancelled:
    case NoticeKind::cancel_request:
    case NoticeKind::confirm:
      return was_answered(notice);
    default:
      return "protocol error: unknown notice";
  }
}

// A pull that this side serves by putting.
std::string UcxPeer::was_asked(const Notice& notice, std::span<const std::uint32_t> segments) {
  if (notice.op != Op::pull) return "protocol error: a request that is no pull";
  {
    const std::lock_guard lock(mutex_);
    if (stopping_) return {};
    LanePlan* const wanted = plan(notice.plan);
    if (wanted == nullptr) return "protocol error: a pull of an unknown plan";
    if (find(false, Op::pull, notice.tag) != nullptr) return "protocol error: a pull under a tag that is open";
    Transfer* const transfer = open_transfer(*wanted, false, Op::pull, Role::move, notice.tag);
    if (transfer == nullptr) return "protocol error: too many open transfers";
    try {
      wanted->ranges(segments, transfer->left);
    } catch (const Error&) {
      return "protocol error: a pull of an unknown segment";
    }
    queue(*transfer);
  }
  alert_all();
  return {};
}

// The other side's word on what it writes here: a push of its own, or a pull of ours.
std::string UcxPeer::was_written(const Notice& notice) {
  Outcome outcome;
  outcome.tag = notice.tag;
  {
    const std::lock_guard lock(mutex_);
    const LanePlan* const of = plan(notice.plan);
    if (of == nullptr || notice.total > of->bytes() || notice.count > notice.total)
      return "protocol error: bytes written that no plan has";
    bytes_moved_.fetch_add(notice.count, std::memory_order_relaxed);
    if (notice.kind == NoticeKind::progress || stopping_) return {};
    outcome.notice = notice;
    if (notice.op == Op::push) {
      outcome.notice->kind = NoticeKind::confirm;
      outcome.event = EventKind::delivered;
    } else {
      Transfer* const pull = find(true, Op::pull, notice.tag);
      if (pull == nullptr || pull->role != Role::ask || pull->plan != of)
        return "protocol error: bytes written that nobody asked for";
      pull->open = false;
      outcome.notice->kind = NoticeKind::delivered;
      outcome.event = EventKind::confirmed;
    }
  }
  perform(outcome);
  return {};
}

// The other side's word on a transfer of which it, or this side, has moved the bytes.
std::string UcxPeer::was_answered(const Notice& notice) {
  Outcome outcome;
  outcome.tag = notice.tag;
  {
    const std::lock_guard lock(mutex_);
    if (stopping_) return {};
    const LanePlan* const of = plan(notice.plan);
    if (of == nullptr) return "protocol error: a notice of an unknown plan";
    Transfer* const served = find(false, Op::pull, notice.tag);
    switch (notice.kind) {
      case NoticeKind::confirm: {
        Transfer* const push = find(true, Op::push, notice.tag);
        if (push == nullptr || !push->copied) return "protocol error: bytes confirmed that were not written";
        push->open = false;
        outcome.event = EventKind::confirmed;
        break;
      }
      case NoticeKind::delivered:  // of a pull: by get, or by our puts
        if (notice.op != Op::pull) return "protocol error: a push delivered by its target";
        if (served != nullptr) {
          if (!served->copied) return "protocol error: bytes delivered that were not written";
          served->open = false;
        } else {
          bytes_moved_.fetch_add(std::min(notice.count, of->bytes()), std::memory_order_relaxed);
        }
        outcome.event = EventKind::delivered;
        break;
      case NoticeKind::cancel_request:  // may have crossed our `written`
        if (served != nullptr) outcome = stop(*served);
        break;
      default: {  // cancelled: by whoever moved the bytes
        Transfer* const asked = notice.op == Op::pull ? find(true, Op::pull, notice.tag) : nullptr;
        if (asked != nullptr && asked->role == Role::ask) {
          if (!asked->cancelling) return "protocol error: a cancel that nobody asked for";
          asked->open = false;
        }
        outcome.event = EventKind::cancelled;
      }
    }
  }
  perform(outcome);
  if (notice.kind == NoticeKind::cancel_request) alert_all();
  return {};
}

// --- the end ---------------------------------------------------------------------------------------------------------

void UcxPeer::let_go(Parting parting) noexcept {
  {
    const std::lock_guard lock(mutex_);
    if (!parting_ || parting == Parting::lost) parting_ = parting;
    alert_all();
    if (!started_) return;  // there are no threads to part
  }
  if (own_mover() != nullptr) return;  // its own wait would be for itself
  std::unique_lock lock(mutex_);
  // Movers that are gone, since the peer parted first, send no bye any more.
  changed_.wait_for(lock, farewell_patience,
                    [&] { return all_ended() && (parting == Parting::lost || bye_sent_ || all_gone()); });
}

void UcxPeer::say_bye() noexcept {
  {
    const std::lock_guard lock(mutex_);
    if (bye_sent_ || !started_) return;  // before the wire-up is done nobody listens for notices
  }
  LanePeer::say_bye();
}

void UcxPeer::await_peer() noexcept {
  {
    std::unique_lock lock(mutex_);
    if (bye_sent_) changed_.wait_for(lock, last_word_patience, [this] { return notices_over_; });
    all_over_ = true;
    alert_all();
  }
}

void UcxPeer::alert(Mover& mover) {
  mover.attention.store(true, std::memory_order_seq_cst);
  mover.endpoint.wake();
}

void UcxPeer::alert_all() {
  for (const auto& mover : movers_) alert(*mover);
}

}  // namespace kvxfer::ucx
