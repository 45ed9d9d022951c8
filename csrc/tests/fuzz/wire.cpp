// A peer that knows the token and then says anything, and strangers that do not.
//
// An input is a script. Its first byte says how many lanes the peer opens, or that it is a stranger, whose bytes are
// the rest. A peer then prepares a plan as a proper one would (so that what follows gets past the first checks), and
// the script goes on in records:
//
//   say   which lane, how many bytes, how many more of noise; then the bytes
//   act   what the application does meanwhile: post, arm, cancel
//   poll  how long it waits for events
//
// KVXFER_FUZZ_BACKEND says whose wire it is, each a program of its own. Where peers share memory, one in eight notices
// carries a descriptor: of memory that is sealed, or not, or of something else.
//
// The context may lose that peer and nothing else: now and then a proper client is served. Memory is watched.
#include <netinet/in.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <unistd.h>
#include <algorithm>
#include <cstddef>
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
#include "tests/fuzz/proper.h"
#include "tests/fuzz/target.h"
#include "tests/pair.h"

#if defined(__SANITIZE_THREAD__)
// A hostile peer may send the same bytes of a plan on two lanes, or while they are sent back. Which of them stay is
// undefined, and nothing depends on it: the kernel copies payload, and this side never looks at it.
extern "C" const char* __tsan_default_suppressions();
extern "C" const char* __tsan_default_suppressions() {
  return "race:kvxfer::send_vectors\nrace:kvxfer::receive_vectors\nrace:kvxfer::copy_vectors\n";
}
#endif

namespace kvxfer::test {
namespace {

constexpr const char* backend = KVXFER_FUZZ_BACKEND;
constexpr std::uint64_t region_bytes = 1 << 16;
constexpr std::uint64_t inputs_per_check = 25;     // after which a proper client is served
constexpr std::uint64_t inputs_per_context = 200;  // a context remembers its peers until it is closed
// What the process may grow by. Sanitizers keep books of their own on all memory; no limit can be set for them.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__) || defined(__clang__)
constexpr std::uint64_t memory_limit_kib = UINT64_MAX / 2;
#else
constexpr std::uint64_t memory_limit_kib = 64 << 10;
#endif

// --- scripts ---------------------------------------------------------------------------------------------------------

constexpr std::uint8_t is_stranger = 4, knows_token = 8;  // in the first byte; its last two bits: lanes - 1
constexpr std::size_t most_literal = 255;

enum class Step : std::uint8_t { say, say_too, act, poll };

struct Record {
  Step step = Step::poll;
  std::uint8_t choice = 0;  // of a lane, an action, a wait; taken modulo what there is
  std::uint8_t tag = 0;
  std::uint16_t noise = 0;  // bytes that follow the literal ones
  std::string literal;
};

// Reads what there is; what is cut short is zero or empty.
class Script {
 public:
  Script(const std::uint8_t* data, std::size_t size) : at_(data), end_(data + size) {}

  bool empty() const { return at_ == end_; }
  std::uint8_t byte() { return empty() ? std::uint8_t{0} : *at_++; }
  std::string rest() { return text(static_cast<std::size_t>(end_ - at_)); }
  Record record() {
    const std::uint8_t head = byte();
    Record one{static_cast<Step>(head % 4), static_cast<std::uint8_t>(head / 4), 0, 0, {}};
    if (one.step == Step::act) one.tag = byte();
    if (one.step == Step::say || one.step == Step::say_too) {
      const std::size_t length = byte();
      one.noise = byte();
      one.noise = static_cast<std::uint16_t>(one.noise | byte() << 8);
      one.literal = text(length);
    }
    return one;
  }

 private:
  std::string text(std::size_t length) {
    const std::size_t n = std::min(length, static_cast<std::size_t>(end_ - at_));
    const std::string read(reinterpret_cast<const char*>(at_), n);
    at_ += n;
    return read;
  }

  const std::uint8_t* at_;
  const std::uint8_t* end_;
};

std::string written(const Record& one) {
  std::string text(1, static_cast<char>(static_cast<std::uint8_t>(one.step) + 4 * (one.choice % 64)));
  if (one.step == Step::act) text += static_cast<char>(one.tag);
  if (one.step == Step::say || one.step == Step::say_too) {
    text += static_cast<char>(one.literal.size());
    text += static_cast<char>(one.noise & 0xff);
    text += static_cast<char>(one.noise >> 8);
    text += one.literal;
  }
  return text;
}

// Makes records: valid notices and chunks, valid ones with some bytes changed, cut ones and noise, and actions.
class Author {
 public:
  explicit Author(std::uint64_t seed) : random_(seed) {}

  std::uint64_t below(std::uint64_t n) { return random_() % n; }

  std::string beginning() {
    if (below(8) != 0) return std::string(1, static_cast<char>(below(4)));
    const bool knows = below(2) == 0;
    std::string text(1, static_cast<char>(is_stranger + (knows ? knows_token : 0)));
    if (!knows) text += noise(below(8) == 0 ? below(64) : token.size());
    return text + (below(2) == 0 ? noise(below(100)) : hello());
  }

  Record record() {
    if (below(3) == 0) return {below(4) == 0 ? Step::poll : Step::act, choice(), choice(), 0, {}};
    Record one = below(2) == 0 ? notice() : chunk();
    if (below(60) == 0) one = {Step::say, one.choice, 0, 0, noise(1 + below(most_literal))};
    if (below(60) == 0) one.choice = choice();  // on a lane where it does not belong
    spoil(one);
    return one;
  }

 private:
  std::uint8_t choice() { return static_cast<std::uint8_t>(below(64)); }

  std::string noise(std::uint64_t bytes) {
    std::string text(bytes, '\0');
    for (char& c : text) c = static_cast<char>(random_());
    return text;
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

  // As lane.cpp has it: magic, protocol, lane, lanes, and a client's number.
  std::string hello() {
    const auto protocol = static_cast<std::uint16_t>(number(lane_protocol));
    const auto lane = static_cast<std::uint16_t>(number(0)), lanes = static_cast<std::uint16_t>(number(1));
    return "KVXF" + raw(protocol) + raw(lane) + raw(lanes) + std::string(6, '\0') + noise(8);
  }

  // On lane 0.
  Record notice() {
    Notice one;
    one.kind = static_cast<NoticeKind>(1 + below(15));
    one.plan = static_cast<std::uint32_t>(below(4) == 0 ? number(1) : 0);
    one.op = operation(one.kind == NoticeKind::request ? Op::pull : Op::push);
    one.tag = below(4);
    one.count = number(below(4) == 0 ? below(region_bytes) : 0);
    one.total = number(region_bytes);
    std::string segments;
    std::uint64_t payload = 0;
    if (one.kind == NoticeKind::prepare) {
      one.plan = static_cast<std::uint32_t>(below(2) == 0 ? 1 : number(2));
      one.count = below(4) == 0 ? number(100) : below(100);
      payload = std::min<std::uint64_t>(one.count, 1000) * sizeof(WireDescriptor);
      one.payload_bytes = one.count * sizeof(WireDescriptor);
    } else if (one.kind == NoticeKind::request && below(2) == 0) {
      const std::uint64_t n = below(20);
      for (std::uint64_t i = 0; i < n; ++i) segments += raw(static_cast<std::uint32_t>(below(3)));
      one.payload_bytes = segments.size();
    }
    if (below(16) == 0) one.payload_bytes = number(one.payload_bytes);
    return {Step::say, 0, 0, static_cast<std::uint16_t>(payload), raw(one) + segments};
  }

  // On one of the others.
  Record chunk() {
    tcp::ChunkHeader one;
    one.plan = static_cast<std::uint32_t>(below(8) == 0 ? number(1) : 0);
    one.tag = below(4);
    one.op = operation(Op::push);
    one.from = number(below(region_bytes));
    one.bytes = number(1 + below(region_bytes / 8));
    one.total = number(region_bytes);
    return {Step::say_too, choice(), 0, static_cast<std::uint16_t>(std::min(one.bytes, region_bytes - 1)), raw(one)};
  }

  void spoil(Record& one) {
    if (one.literal.empty()) return;
    if (below(8) == 0)
      for (std::uint64_t i = 0; i <= below(3); ++i)
        one.literal[below(std::min<std::uint64_t>(one.literal.size(), 60))] ^= static_cast<char>(1 + below(255));
    if (below(30) == 0) one.literal.resize(below(one.literal.size()));
    if (below(30) == 0) one.noise /= 2;
  }

  std::mt19937_64 random_;
};

// --- what is attacked ------------------------------------------------------------------------------------------------

class Attacked {
 public:
  Attacked() : local_(find_backend(backend).one_host) { renew(); }

  void take(Script script) {
    if (inputs_ % inputs_per_context == inputs_per_context - 1) renew();
    const std::uint8_t first = script.byte();
    if ((first & is_stranger) != 0)
      stranger(((first & knows_token) != 0 ? token : "") + script.rest());
    else
      peer(static_cast<std::uint16_t>(local_ && first % 4 != 3 ? 1 : 1 + first % 4), script);
    if (inputs_++ % inputs_per_check == 0) serve_proper_client();
    if (before_ == 0) before_ = resident_kib();
    if (resident_kib() > before_ + memory_limit_kib) throw Failure("memory grows without bounds");
  }

 private:
  static std::uint64_t resident_kib() {
    std::ifstream statm("/proc/self/statm");
    std::uint64_t pages = 0, resident = 0;
    statm >> pages >> resident;
    return resident * static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE)) / 1024;
  }

  void renew() {
    if (context_) context_->close();
    context_ = find_backend(backend).open(token, {});
    region_ = context_->allocate(region_bytes, MemoryKind::host, -1);
    quiet_ = context_->allocate(region_bytes, MemoryKind::host, -1);
    endpoint_ = context_->listen("127.0.0.1", 0);
  }

  // What is said may be refused at any point: errors of sending are no failures.
  void say(const Socket& lane, const std::string& text) {
    [[maybe_unused]] const auto sent = ::send(lane.fd(), text.data(), text.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  }

  void say_with_descriptor(const Socket& lane, std::string text, std::uint32_t choice) {
    const Mapping sealed(choice % 4 < 2 ? region_bytes : 1, Backing::shared);
    const Socket plain(::memfd_create("fuzz", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    const int choices[] = {sealed.descriptor(), plain.fd(), STDIN_FILENO};
    iovec vector{text.data(), text.size()};
    send_vectors(lane.fd(), &vector, 1, choices[choice % 3]);
  }

  void stranger(const std::string& says) {
    const Socket socket(::socket(local_ ? AF_UNIX : AF_INET, SOCK_STREAM, 0));
    sockaddr_storage to{};
    std::size_t length = sizeof(sockaddr_in);
    if (local_) {
      auto* name = reinterpret_cast<sockaddr_un*>(&to);
      name->sun_family = AF_UNIX;
      const std::string text = endpoint_.substr(std::strlen("unix:@"));
      std::memcpy(name->sun_path + 1, text.data(), text.size());
      length = offsetof(sockaddr_un, sun_path) + 1 + text.size();
    } else {
      auto* port = reinterpret_cast<sockaddr_in*>(&to);
      port->sin_family = AF_INET;
      port->sin_port = htons(static_cast<std::uint16_t>(std::stoi(endpoint_.substr(endpoint_.rfind(':') + 1))));
      port->sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    }
    if (::connect(socket.fd(), reinterpret_cast<const sockaddr*>(&to), static_cast<socklen_t>(length)) != 0)
      throw Failure("no connection");
    say(socket, says);
    const bool knew = says.substr(0, token.size()) == token;
    try {
      context_->accept(Deadline::after(2'000'000));
      if (!knew) throw Failure("a stranger was accepted");
    } catch (const Error& error) {
      if (!knew && error.fault() != Fault::peer_lost) throw Failure("what a stranger said after the token was read");
    }
  }

  void peer(std::uint16_t lane_count, Script& script) {
    std::vector<Socket> lanes;
    std::shared_ptr<Peer> peer;
    try {
      together([&] { peer = context_->accept(soon()); },
               [&] { lanes = connect_lanes(endpoint_, token, lane_count, soon()); });
    } catch (const Error& error) {
      // No data lanes, or some where there should be none.
      if (error.fault() == Fault::usage && (lane_count == 1) != local_) return;
      throw;
    }
    prepare_properly(lanes[0], *peer);
    noise_.seed(lane_count);
    while (!script.empty()) {
      const Record one = script.record();
      if (one.step == Step::act)
        act(one.choice % 5, one.tag);
      else if (one.step == Step::poll)
        drain(one.choice % 3 * 500'000);
      else if (local_ && one.choice % 8 == 0)
        say_with_descriptor(lanes[0], one.literal, one.choice / 8U);
      else
        say(lanes[one.step == Step::say || local_ ? one.choice % lane_count : 1 + one.choice % (lane_count - 1)],
            one.literal + noise(one.noise));
    }
    drain(500'000);
    plan_.reset();
  }

  std::string noise(std::size_t bytes) {
    std::string text(bytes, '\0');
    for (char& c : text) c = static_cast<char>(noise_());
    return text;
  }

  void drain(Nanoseconds ns) {
    Event events[64];
    while (context_->poll(events, Deadline::after(ns)) > 0) {
    }
  }

  void prepare_properly(const Socket& lane, Peer& peer) {
    peer.import_keys(context_->export_keys({&region_, 1}));
    const Halves halves(region_bytes);
    say(lane, halves.notice());
    together(
        [&] {
          if (context_->capabilities().own_memory) show_pool_when_asked(lane);
        },
        [&] { plan_ = context_->prepare(peer, halves.arrays(), soon()); });
    peer_ = &peer;
  }

  static void show_pool_when_asked(const Socket& lane) {
    const Mapping pool(region_bytes, Backing::shared);  // stands for the peer's
    Notice asked, shown;
    if (receive_all(lane.fd(), &asked, sizeof asked) != 0 || asked.kind != NoticeKind::pool_wanted)
      throw Failure("the peer's pool is not asked for");
    shown.kind = NoticeKind::pool;
    shown.total = region_bytes;
    iovec vector{&shown, sizeof shown};
    send_vectors(lane.fd(), &vector, 1, pool.descriptor());
  }

  // The application goes on meanwhile.
  void act(int action, std::uint8_t choice) {
    const std::uint64_t tag = choice % 4;
    try {
      ready_ = choice / 4U % 2;
      switch (action) {
        case 0:
          context_->post(*plan_, Op::push, {}, tag, nullptr);
          break;
        case 1:
          context_->post(*plan_, Op::pull, {}, tag, nullptr);
          break;
        case 2:
          context_->cancel(*peer_, tag);
          break;
        case 3:
          context_->arm(*plan_, Op::push, {}, tag);
          break;
        default:
          context_->post(*plan_, Op::push, {}, tag, &ready_);
          break;
      }
    } catch (const Error&) {  // lost already, or the tag is open
    }
  }

  void serve_proper_client() {
    End client;
    client.context = find_backend(backend).open(token, {});
    client.allocate(region_bytes);
    std::shared_ptr<Peer> peer;
    together([&] { client.peer = client.context->connect(endpoint_, soon()); },
             [&] { peer = context_->accept(soon()); });
    client.peer->import_keys(context_->export_keys({&quiet_, 1}));
    peer->import_keys(client.context->export_keys({&client.region, 1}));
    std::memset(client.region.address, static_cast<int>(inputs_ % 256), region_bytes);
    const std::vector<std::uint32_t> zero{0}, quiet{quiet_.id};
    const std::vector<std::uint64_t> offset{0}, length{region_bytes};
    std::shared_ptr<Plan> mine, theirs;
    together(
        [&] { mine = context_->prepare(*peer, {quiet, offset, zero, offset, length, zero}, soon()); },
        [&] { theirs = client.context->prepare(*client.peer, {zero, offset, quiet, offset, length, zero}, soon()); });
    client.context->post(*theirs, Op::push, {}, 1, nullptr);
    client.wait(EventKind::confirmed, 1);
    if (std::memcmp(client.region.address, quiet_.address, region_bytes) != 0)
      throw Failure("a proper client's bytes are wrong");
    client.context->close();
  }

  const bool local_;
  std::mt19937_64 noise_;
  std::unique_ptr<Context> context_;
  Region region_;
  Region quiet_;  // of proper clients: copies that hostile peers began may still be under way in the other one
  std::string endpoint_;
  std::shared_ptr<Plan> plan_;
  ReadyFlag ready_{0};
  Peer* peer_ = nullptr;
  std::uint64_t inputs_ = 0;
  std::uint64_t before_ = 0;
};

}  // namespace
}  // namespace kvxfer::test

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static kvxfer::test::Attacked attacked;
  attacked.take({data, size});
  return 0;
}

extern "C" std::size_t LLVMFuzzerCustomMutator(std::uint8_t* data, std::size_t size, std::size_t max_size,
                                               unsigned seed) {
  kvxfer::test::Author author(seed);
  std::string script(reinterpret_cast<const char*>(data), size);
  if (script.empty() || author.below(12) == 0) script = author.beginning();
  if (author.below(4) == 0) {  // a script of records without one of them, or with one in another place
    kvxfer::test::Script old({reinterpret_cast<const std::uint8_t*>(script.data()), script.size()});
    std::string changed(1, static_cast<char>(old.byte()));
    while (!old.empty()) {
      const std::string one = written(old.record());
      if (author.below(8) == 0) continue;
      changed.insert(author.below(8) == 0 ? 1 : changed.size(), one);
    }
    script = changed;
  } else if (author.below(4) == 0) {
    return LLVMFuzzerMutate(data, size, max_size);
  } else {
    const std::uint64_t records = 1 + author.below(6);
    for (std::uint64_t i = 0; i < records; ++i) script += written(author.record());
  }
  const std::size_t length = std::min(script.size(), max_size);
  std::memcpy(data, script.data(), length);
  return length;
}
