// kvxfer_fuzz_wire [SEED [ITERATIONS]]: a peer that knows the token and then says anything, and strangers that do not.
//
// Each iteration wires up one connection to the same context, as a client of one or more lanes, prepares a plan as a
// proper client would (so that what follows gets past the first checks), and then sends valid notices and chunks, valid
// ones with some bytes changed, cut ones and noise, on all lanes in random order. The context may lose that peer and
// nothing else: now and then, and at the end, a proper client is served. Memory is watched. The same seed sends the
// same bytes.
#include <netinet/in.h>
#include <sys/socket.h>

#include <unistd.h>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <random>
#include <string>
#include <thread>

#include "backend/lane.h"
#include "backend/lane_peer.h"
#include "backends/tcp/peer.h"
#include "tests/pair.h"

#if defined(__SANITIZE_THREAD__)
// A hostile peer may send the same bytes of a plan on two lanes, or while they are sent back. Which of them stay is
// undefined, and nothing depends on it: the kernel copies payload, and this side never looks at it.
extern "C" const char* __tsan_default_suppressions();
extern "C" const char* __tsan_default_suppressions() {
  return "race:kvxfer::send_vectors\nrace:kvxfer::receive_vectors\n";
}
#endif

namespace kvxfer::test {
namespace {

constexpr std::uint64_t region_bytes = 1 << 16;
// What the process may grow by. Sanitizers keep books of their own on all memory; no limit can be set for them.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr std::uint64_t memory_limit_kib = UINT64_MAX / 2;
#else
constexpr std::uint64_t memory_limit_kib = 64 << 10;
#endif

class Fuzz {
 public:
  explicit Fuzz(std::uint64_t seed) : random_(seed) {
    context_ = find_backend("tcp").open(token, {});
    region_ = context_->allocate(region_bytes, MemoryKind::host, -1);
    endpoint_ = context_->listen("127.0.0.1", 0);
  }

  void run(std::uint64_t iterations) {
    const std::uint64_t before = resident_kib();
    for (std::uint64_t i = 0; i < iterations; ++i) {
      if (i % 8 == 7)
        stranger();
      else
        hostile_peer();
      if (i % 50 == 0) serve_proper_client();
      if (resident_kib() > before + memory_limit_kib) throw Failure("memory grows without bounds");
      if (i % 200 == 199) renew();
    }
    serve_proper_client();
  }

 private:
  std::uint64_t below(std::uint64_t n) { return random_() % n; }

  static std::uint64_t resident_kib() {
    std::ifstream statm("/proc/self/statm");
    std::uint64_t pages = 0, resident = 0;
    statm >> pages >> resident;
    return resident * static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE)) / 1024;
  }

  // A context remembers its peers until it is closed; a new one from time to time keeps the run bounded.
  void renew() {
    context_->close();
    context_ = find_backend("tcp").open(token, {});
    region_ = context_->allocate(region_bytes, MemoryKind::host, -1);
    endpoint_ = context_->listen("127.0.0.1", 0);
  }

  std::string noise(std::uint64_t bytes) {
    std::string text(bytes, '\0');
    for (char& c : text) c = static_cast<char>(random_());
    return text;
  }

  template <typename T>
  static std::string raw(const T& value) {
    return {reinterpret_cast<const char*>(&value), sizeof value};
  }

  // Now and then a number at the edge of what is allowed, or far beyond.
  std::uint64_t number(std::uint64_t usual) {
    switch (below(20)) {
      case 0:
        return 0;
      case 1:
        return UINT64_MAX - below(3);
      case 2:
        return usual + 1;
      case 3:
        return std::uint64_t{1} << below(64);
      case 4:
        return random_();
      default:
        return usual;
    }
  }

  Op operation(Op usual) { return static_cast<Op>(below(20) == 0 ? below(3) : static_cast<std::uint64_t>(usual)); }

  std::string notice() {
    Notice one;
    one.kind = static_cast<NoticeKind>(1 + below(11));
    one.plan = static_cast<std::uint32_t>(below(4) == 0 ? number(1) : 0);
    one.op = operation(one.kind == NoticeKind::request ? Op::pull : Op::push);
    one.tag = below(4);
    one.count = number(below(4) == 0 ? below(region_bytes) : 0);
    one.total = number(region_bytes);
    std::string payload;
    if (one.kind == NoticeKind::prepare) {
      one.plan = static_cast<std::uint32_t>(below(2) == 0 ? 1 : number(2));
      one.count = below(4) == 0 ? number(100) : below(100);
      payload = noise(std::min<std::uint64_t>(one.count, 1000) * sizeof(WireDescriptor));
      one.payload_bytes = one.count * sizeof(WireDescriptor);
    } else if (one.kind == NoticeKind::request && below(2) == 0) {
      const std::uint64_t n = below(20);
      for (std::uint64_t i = 0; i < n; ++i) payload += raw(static_cast<std::uint32_t>(below(3)));
      one.payload_bytes = payload.size();
    }
    if (below(16) == 0) one.payload_bytes = number(one.payload_bytes);
    return raw(one) + payload;
  }

  std::string chunk() {
    tcp::ChunkHeader one;
    one.plan = static_cast<std::uint32_t>(below(8) == 0 ? number(1) : 0);
    one.tag = below(4);
    one.op = operation(Op::push);
    one.from = number(below(region_bytes));
    one.bytes = number(1 + below(region_bytes / 8));
    one.total = number(region_bytes);
    return raw(one) + noise(std::min(one.bytes, region_bytes));
  }

  std::string spoiled(std::string text) {
    if (below(8) == 0)
      for (std::uint64_t i = 0; i <= below(3); ++i)
        text[below(std::min<std::uint64_t>(text.size(), 60))] ^= static_cast<char>(1 + below(255));
    if (below(30) == 0) text.resize(below(text.size()));
    return text;
  }

  // What is said may be refused at any point: errors of sending are no failures.
  void say(const Socket& lane, const std::string& text) {
    [[maybe_unused]] const auto sent = ::send(lane.fd(), text.data(), text.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  }

  void stranger() {
    const std::size_t colon = endpoint_.rfind(':');
    const Socket socket(::socket(AF_INET, SOCK_STREAM, 0));
    sockaddr_in to{};
    to.sin_family = AF_INET;
    to.sin_port = htons(static_cast<std::uint16_t>(std::stoi(endpoint_.substr(colon + 1))));
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (::connect(socket.fd(), reinterpret_cast<const sockaddr*>(&to), sizeof to) != 0) throw Failure("no connection");
    std::string text = noise(below(200));
    if (below(2) == 0) text = token.substr(0, below(33)) + text;
    say(socket, text);
    try {
      context_->accept(Deadline::after(2'000'000));
      throw Failure("a stranger was accepted");
    } catch (const Error&) {
    }
  }

  void hostile_peer() {
    const auto lane_count = static_cast<std::uint16_t>(1 + below(4));
    std::vector<Socket> lanes;
    std::shared_ptr<Peer> peer;
    try {
      together([&] { peer = context_->accept(soon()); },
               [&] { lanes = connect_lanes(endpoint_, token, lane_count, soon()); });
    } catch (const Error& error) {
      if (error.fault() == Fault::usage && lane_count == 1) return;  // no data lanes
      throw;
    }
    prepare_properly(lanes[0], *peer);
    const std::uint64_t messages = 1 + below(30);
    for (std::uint64_t i = 0; i < messages; ++i) {
      const std::uint64_t lane = below(3) == 0 ? below(lane_count) : below(2) * (1 + below(lane_count - 1U));
      const bool at_home = below(60) != 0;
      std::string text = (lane == 0) == at_home ? notice() : chunk();
      if (below(60) == 0) text = noise(1 + below(500));
      say(lanes[lane], spoiled(std::move(text)));
      if (below(2) == 0) act();
    }
    Event events[64];
    while (context_->poll(events, Deadline::after(below(3) * 500'000)) > 0) {
    }
    plan_.reset();
  }

  // The same plan on both sides: half of the region in two segments.
  void prepare_properly(const Socket& lane, Peer& peer) {
    peer.import_keys(context_->export_keys({&region_, 1}));
    const std::vector<std::uint32_t> zeros(2, 0), starts{0, 1};
    const std::vector<std::uint64_t> offsets{0, region_bytes / 2}, lengths{region_bytes / 2, region_bytes / 2};
    Notice one;
    one.kind = NoticeKind::prepare;
    one.count = 2;
    one.payload_bytes = 2 * sizeof(WireDescriptor);
    std::string text = raw(one);
    for (std::size_t i = 0; i < 2; ++i) text += raw(WireDescriptor{0, 0, offsets[i], lengths[i]});
    say(lane, text);
    plan_ = context_->prepare(peer, {zeros, offsets, zeros, offsets, lengths, starts}, soon());
    peer_ = &peer;
  }

  // The application goes on meanwhile.
  void act() {
    try {
      ready_ = static_cast<std::uint32_t>(below(2));
      switch (below(5)) {
        case 0:
          context_->post(*plan_, Op::push, {}, below(4), nullptr);
          break;
        case 4:
          context_->post(*plan_, Op::push, {}, below(4), &ready_);
          break;
        case 1:
          context_->post(*plan_, Op::pull, {}, below(4), nullptr);
          break;
        case 2:
          context_->cancel(*peer_, below(4));
          break;
        default:
          context_->arm(*plan_, Op::push, {}, below(4));
          break;
      }
    } catch (const Error&) {  // lost already, or the tag is open
    }
  }

  void serve_proper_client() {
    End client;
    client.context = find_backend("tcp").open(token, {});
    client.region = client.context->allocate(region_bytes, MemoryKind::host, -1);
    std::shared_ptr<Peer> peer;
    together([&] { client.peer = client.context->connect(endpoint_, soon()); },
             [&] { peer = context_->accept(soon()); });
    client.peer->import_keys(context_->export_keys({&region_, 1}));
    peer->import_keys(client.context->export_keys({&client.region, 1}));
    std::memset(client.region.address, static_cast<int>(below(256)), region_bytes);
    const std::vector<std::uint32_t> zero{0};
    const std::vector<std::uint64_t> offset{0}, length{region_bytes};
    std::shared_ptr<Plan> mine, theirs;
    together(
        [&] { mine = context_->prepare(*peer, {zero, offset, zero, offset, length, zero}, soon()); },
        [&] { theirs = client.context->prepare(*client.peer, {zero, offset, zero, offset, length, zero}, soon()); });
    client.context->post(*theirs, Op::push, {}, 1, nullptr);
    client.wait(EventKind::confirmed, 1);
    if (std::memcmp(client.region.address, region_.address, region_bytes) != 0)
      throw Failure("a proper client's bytes are wrong");
    client.context->close();
  }

  std::mt19937_64 random_;
  std::unique_ptr<Context> context_;
  Region region_;
  std::string endpoint_;
  std::shared_ptr<Plan> plan_;
  ReadyFlag ready_{0};
  Peer* peer_ = nullptr;
};

}  // namespace
}  // namespace kvxfer::test

int main(int argc, char** argv) {
  const std::uint64_t seed = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 1;
  const std::uint64_t iterations = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 300;
  try {
    kvxfer::test::Fuzz(seed).run(iterations);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "seed %llu: %s\n", static_cast<unsigned long long>(seed), error.what());
    return 1;
  }
  std::printf("seed %llu, %llu iterations: survived\n", static_cast<unsigned long long>(seed),
              static_cast<unsigned long long>(iterations));
  return 0;
}
