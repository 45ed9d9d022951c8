// What a peer of `ucx` says that kvxfer itself reads: its keys, what precedes UCX on lane 0, and its messages.
//
// The first byte of an input says which; the rest is
//
//   keys     their text
//   offer    what a side says that connects, in place of its half of the wire-up
//   answer   the same of a side that listens; the ports that it names are none
//   message  records of a peer that is wired up: how many bytes of head, how many of rest, then both; or, with 255 in
//            the first place, what the application does meanwhile
//
// What UCX reads by itself is UCX's, and not tried here: a key inside of a text of keys is never unpacked.
#include <algorithm>
#include <cstring>
#include <memory>
#include <random>
#include <string>

#include "backend/lane.h"
#include "backend/lane_peer.h"
#include "backends/ucx/endpoint.h"
#include "backends/ucx/memory.h"
#include "backends/ucx/ucx.h"
#include "backends/ucx/wire_up.h"
#include "tests/fuzz/proper.h"
#include "tests/fuzz/target.h"
#include "tests/pair.h"

namespace kvxfer::test {
namespace {

enum class Part : std::uint8_t { keys, offer, answer, message };
constexpr std::size_t parts = 4;

constexpr std::uint64_t region_bytes = 1 << 16;
constexpr std::uint8_t act = 255;
constexpr std::uint64_t peers_per_context = 50;  // it remembers them until it is closed
constexpr Nanoseconds hasty = 20'000'000;        // what never comes is not waited for longer

void take_keys(const std::string& text) {
  try {
    const ucx::Keys keys = ucx::read(text);
    for (const RegionKey& region : keys.regions)
      if (std::ranges::none_of(keys.pools, [&](const ucx::PoolKey& pool) {
            std::size_t at = 0;
            return pool.number == region.pool && ucx::holding(std::vector{pool}, at, region.place, region.bytes);
          }))
        throw Failure("a region beyond its pool was taken");
  } catch (const Error& error) {
    if (error.fault() != Fault::usage) throw;
  }
}

void must_fail(const std::function<void()>& wire_up) {
  try {
    wire_up();
  } catch (const Error&) {
    return;
  }
  throw Failure("a peer was wired up that said nothing but noise");
}

void take_offer(const std::string& says) {
  const auto context = ucx::open(token, {});
  const std::string endpoint = context->listen("127.0.0.1", 0);
  std::vector<Socket> lanes;
  together([&] { must_fail([&] { context->accept(Deadline::after(hasty)); }); },
           [&] {
             try {
               lanes = connect_lanes(endpoint, token, 1, Deadline::after(50 * hasty));
               send_all(lanes[0].fd(), says.data(), says.size());
             } catch (const Error&) {  // on a busy machine nobody waits any more
             }
           });
}

void take_answer(std::string says) {
  // No connection to where somebody may be: from one address of this host to one that is not listened at.
  const std::size_t family = offsetof(ucx::Answer, family);
  if (says.size() >= sizeof(ucx::Answer)) std::memset(&says[family], 0, sizeof(ucx::Answer::family));
  const std::uint16_t nobody = 1;
  for (std::size_t at = sizeof(ucx::Answer) + offsetof(ucx::EndpointAddress, port); at + sizeof nobody <= says.size();
       at += sizeof(ucx::EndpointAddress))
    std::memcpy(&says[at], &nobody, sizeof nobody);
  LaneListener listener("127.0.0.1", 0, token);
  const auto context = ucx::open(token, {});
  std::vector<Socket> lanes;
  together([&] { must_fail([&] { context->connect(listener.endpoint(), Deadline::after(hasty)); }); },
           [&] {
             try {
               lanes = listener.accept(Deadline::after(50 * hasty));
               send_all(lanes[0].fd(), says.data(), says.size());
             } catch (const Error&) {
             }
           });
}

// A context and its peers, each of which is wired up as it should be, and then says anything.
class Attacked {
 public:
  void take(const std::string& script) {
    if (peers_++ % peers_per_context == 0) renew();
    wire_up();
    prepare();
    std::size_t at = 0;
    const auto byte = [&] { return at < script.size() ? static_cast<std::uint8_t>(script[at++]) : std::uint8_t{0}; };
    while (at < script.size() && peer_->lost().empty()) {
      const std::uint8_t head = byte(), rest = byte();
      if (head == act) {
        meanwhile(rest);
        continue;
      }
      const std::string says = script.substr(at, std::size_t{head} + rest);
      at += says.size();
      const std::size_t cut = std::min<std::size_t>(head, says.size());
      send(says.substr(0, cut), says.substr(cut));
    }
    drain();
    plan_.reset();
    endpoint_.reset();
    lanes_.clear();
  }

 private:
  void renew() {
    if (context_) context_->close();
    context_ = ucx::open(token, {});
    region_ = context_->allocate(region_bytes, MemoryKind::host, -1);
    listens_at_ = context_->listen("127.0.0.1", 0);
    other_ = std::make_shared<ucx::UcpContext>(ucx::library(), ucx::Errors::peer);
  }

  void wire_up() {
    together([&] { peer_ = context_->accept(soon()); },
             [&] {
               lanes_ = connect_lanes(listens_at_, token, 1, soon());
               const int fd = lanes_[0].fd();
               const ucx::Offer offer;
               ucx::Answer answer;
               ucx::EndpointAddress there;
               send_all(fd, &offer, sizeof offer);
               receive_all(fd, &answer, sizeof answer);
               receive_all(fd, &there, sizeof there);
               endpoint_ = std::make_unique<ucx::Endpoint>(other_, ucx::Errors::peer, there.client_id);
               endpoint_->receive_with([](void*, std::span<const std::byte>, std::span<const std::byte>) {}, nullptr);
               endpoint_->connect(ucx::with_port(ucx::peer_of(fd), there.port));
               endpoint_->begin_flush();
               const Deadline deadline = soon();
               while (!endpoint_->flushed() && !deadline.passed()) endpoint_->progress();
               send_all(fd, &ucx::ready_byte, 1);
               while (!ucx::said_ready(fd) && !deadline.passed()) endpoint_->progress();
             });
  }

  // The region onto itself: the peer's key is this side's own.
  void prepare() {
    peer_->import_keys(context_->export_keys({&region_, 1}));
    const Halves halves(region_bytes);
    const std::string text = halves.notice();
    send_all(lanes_[0].fd(), text.data(), text.size());
    plan_ = context_->prepare(*peer_, halves.arrays(), soon());
  }

  void send(const std::string& head, const std::string& rest) {
    const ucx::Library& library = ucx::library();
    ucp_request_param_t param{};
    param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
    param.flags = UCP_AM_SEND_FLAG_EAGER;
    const ucs_status_ptr_t request =
        library.ucp_am_send_nbx(endpoint_->get(), 1, head.data(), head.size(), rest.data(), rest.size(), &param);
    if (!UCS_PTR_IS_PTR(request)) return;
    const Deadline deadline = Deadline::after(hasty);
    while (library.ucp_request_check_status(request) == UCS_INPROGRESS && !deadline.passed()) endpoint_->progress();
    library.ucp_request_free(request);
  }

  void meanwhile(std::uint8_t choice) {
    const std::uint64_t tag = choice / 4 % 4;
    try {
      if (choice % 4 == 0) context_->post(*plan_, Op::pull, {}, tag, nullptr);
      if (choice % 4 == 1) context_->cancel(*peer_, tag);
      if (choice % 4 == 2) context_->arm(*plan_, Op::pull, {}, tag);
    } catch (const Error&) {  // lost already, or the tag is open
    }
    if (choice % 4 == 3) drain();
  }

  void drain() {
    Event events[64];
    for (int turn = 0; turn < 20; ++turn) {
      endpoint_->progress();
      context_->poll(events, Deadline::after(100'000));
    }
  }

  std::unique_ptr<Context> context_;
  Region region_;
  std::string listens_at_;
  std::shared_ptr<ucx::UcpContext> other_;
  std::vector<Socket> lanes_;
  std::unique_ptr<ucx::Endpoint> endpoint_;
  std::shared_ptr<Peer> peer_;
  std::shared_ptr<Plan> plan_;
  std::uint64_t peers_ = 0;
};

// --- inputs ----------------------------------------------------------------------------------------------------------

class Author {
 public:
  explicit Author(unsigned seed) : random_(seed) {}

  std::uint64_t below(std::uint64_t n) { return random_() % n; }

  std::string beginning(Part part) {
    switch (part) {
      case Part::keys:
        return keys();
      case Part::offer:
        return raw(ucx::Offer{ucx::Offer{}.magic,
                              static_cast<std::uint32_t>(number(1 + below(3))),
                              static_cast<ucx::Errors>(below(3)),
                              {}});
      case Part::answer:
        return raw(ucx::Answer{}) + raw(ucx::EndpointAddress{below(9), 1, {}});
      case Part::message:
        break;
    }
    return record();
  }

  std::string record() {
    if (below(4) == 0) return {static_cast<char>(act), static_cast<char>(below(256))};
    Notice one;
    one.kind = static_cast<NoticeKind>(1 + below(15));
    one.plan = static_cast<std::uint32_t>(number(0));
    one.op = static_cast<Op>(below(12) == 0 ? below(3) : 1);
    one.tag = below(4);
    one.total = number(region_bytes);
    one.count = number(below(2) * region_bytes);
    std::string segments;
    if (one.kind == NoticeKind::request)
      for (std::uint64_t i = below(4); i > 0; --i) segments += raw(static_cast<std::uint32_t>(below(3)));
    one.payload_bytes = below(16) == 0 ? number(0) : segments.size();
    std::string head = raw(one);
    if (below(12) == 0) head.resize(below(head.size() + 9));
    return static_cast<char>(head.size()) + std::string(1, static_cast<char>(segments.size())) + head + segments;
  }

 private:
  std::uint64_t number(std::uint64_t usual) {
    switch (below(20)) {
      case 0:
        return UINT64_MAX - below(3);
      case 1:
        return usual + 1;
      case 2:
        return std::uint64_t{1} << below(64);
      default:
        return usual;
    }
  }

  std::string keys() {
    ucx::Keys keys;
    for (std::uint64_t i = below(3); i > 0; --i) {
      keys.pools.push_back(
          {static_cast<std::uint32_t>(i), number(4096 * i), number(4096), std::string(1 + below(9), 'k')});
      keys.regions.push_back({static_cast<std::uint32_t>(i), static_cast<std::uint32_t>(number(i)), number(1024),
                              number(4096 * i + below(4096))});
    }
    return ucx::write(keys);
  }

  std::mt19937_64 random_;
};

}  // namespace
}  // namespace kvxfer::test

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace kvxfer::test;
  if (size == 0) return 0;
  const std::string rest(reinterpret_cast<const char*>(data + 1), size - 1);
  const Part part{static_cast<std::uint8_t>(data[0] % parts)};
  static const bool has_library = kvxfer::ucx::probe().available;
  if (part == Part::keys) take_keys(rest);
  if (!has_library || part == Part::keys) return 0;
  static Attacked attacked;
  if (part == Part::offer) take_offer(rest);
  if (part == Part::answer) take_answer(rest);
  if (part == Part::message) attacked.take(rest);
  return 0;
}

extern "C" std::size_t LLVMFuzzerCustomMutator(std::uint8_t* data, std::size_t size, std::size_t max_size,
                                               unsigned seed) {
  using namespace kvxfer::test;
  Author author(seed);
  std::string text(reinterpret_cast<const char*>(data), size);
  if (text.empty() || author.below(6) == 0) {
    const std::uint64_t chosen = author.below(8);  // half of them messages, and a quarter keys
    text = std::string(1, static_cast<char>(chosen < parts ? chosen : chosen < 7 ? 3 : 0));
    text += author.beginning(static_cast<Part>(text[0]));
  } else if (text[0] % parts == static_cast<int>(Part::message) && author.below(3) != 0) {
    text += author.record();
  } else {
    return LLVMFuzzerMutate(data, size, max_size);
  }
  const std::size_t length = std::min(text.size(), max_size);
  std::memcpy(data, text.data(), length);
  return length;
}
