#include "backend/lane.h"

#include <arpa/inet.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <optional>
#include <string_view>
#include <thread>
#include <vector>

#include "tests/pair.h"

namespace {
constexpr std::string_view silent = "silent.test";
std::atomic<bool> silence{true};
std::atomic<int> asking{0};
}  // namespace

// In place of the C library's: nobody answers for one name, until the silence is over.
extern "C" int getaddrinfo(const char* host, const char* port, const addrinfo* hints, addrinfo** found) {
  if (host != nullptr && host == silent && (hints->ai_flags & AI_NUMERICHOST) == 0) {
    ++asking;
    silence.wait(true);
    --asking;
    asking.notify_all();
    return EAI_AGAIN;
  }
  using Real = int (*)(const char*, const char*, const addrinfo*, addrinfo**);
  static const auto real = reinterpret_cast<Real>(::dlsym(RTLD_NEXT, "getaddrinfo"));
  return real(host, port, hints, found);
}

namespace kvxfer::test {
namespace {

std::uint16_t port_of(const std::string& endpoint) {
  return static_cast<std::uint16_t>(std::stoi(endpoint.substr(endpoint.rfind(':') + 1)));
}

// A plain connection to a listener on loopback, as a stranger makes it.
Socket stranger(const std::string& endpoint) {
  Socket socket(::socket(AF_INET, SOCK_STREAM, 0));
  sockaddr_in to{};
  to.sin_family = AF_INET;
  to.sin_port = htons(port_of(endpoint));
  to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  CHECK(::connect(socket.fd(), reinterpret_cast<const sockaddr*>(&to), sizeof to) == 0);
  return socket;
}

// What a client says after the token, field by field as on the wire.
std::string hello(std::uint16_t protocol, std::uint16_t lane, std::uint16_t lanes, std::uint64_t client) {
  std::string bytes("KVXF", 4);
  const auto put = [&](const auto& value) { bytes.append(reinterpret_cast<const char*>(&value), sizeof value); };
  put(protocol);
  put(lane);
  put(lanes);
  put(std::uint16_t{0});
  put(std::uint32_t{0});
  put(client);
  return bytes;
}

void say(const Socket& socket, const std::string& what) {
  CHECK_EQ(send_all(socket.fd(), what.data(), what.size()), 0);
}

// True when the other side dropped the connection without a word.
bool dropped(const Socket& socket) {
  const timeval patience{10, 0};
  ::setsockopt(socket.fd(), SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
  char byte = 0;
  const ssize_t n = ::recv(socket.fd(), &byte, 1, 0);
  return n == 0 || (n < 0 && errno == ECONNRESET);
}

struct Server {
  LaneListener listener{"127.0.0.1", 0, token};
  std::string endpoint = listener.endpoint();
  std::vector<Socket> lanes;
  std::string error;
  std::optional<Fault> fault;
  std::thread thread;

  explicit Server(Nanoseconds patience = 20 * second)
      : thread([this, patience] {
          try {
            lanes = listener.accept(Deadline::after(patience));
          } catch (const Error& caught) {
            error = caught.what();
            fault = caught.fault();
          }
        }) {}
  ~Server() {
    listener.interrupt();
    wait();
  }
  void wait() {
    if (thread.joinable()) thread.join();
  }
};

TEST(lane, connects_all_lanes_in_order) {
  Server server;
  const std::vector<Socket> mine = connect_lanes(server.endpoint, token, 5, soon());
  server.wait();
  CHECK_EQ(server.lanes.size(), 5U);
  for (char i = 0; i < 5; ++i) {
    const auto lane = static_cast<std::size_t>(i);
    CHECK_EQ(send_all(mine[lane].fd(), &i, 1), 0);
    char got = -1;
    CHECK_EQ(receive_all(server.lanes[lane].fd(), &got, 1), 0);
    CHECK_EQ(got, i);
  }
  CHECK_EQ(interface_of(mine[0].fd()), "lo");
}

TEST(lane, goes_over_unix_sockets_too) {
  const LaneListener listener(token);
  const LaneListener other(token);
  CHECK(listener.endpoint().starts_with("unix:@kvxfer-") && listener.endpoint() != other.endpoint());
  CHECK(is_local(listener.endpoint()) && !is_local("127.0.0.1:1"));
  LaneListener accepting(token);
  std::vector<Socket> mine, theirs;
  together([&] { mine = connect_lanes(accepting.endpoint(), token, 3, soon()); },
           [&] { theirs = accepting.accept(soon()); });
  CHECK_EQ(theirs.size(), 3U);
  const char sent = 'u';
  CHECK_EQ(send_all(mine[2].fd(), &sent, 1), 0);
  char got = 0;
  CHECK_EQ(receive_all(theirs[2].fd(), &got, 1), 0);
  CHECK_EQ(got, sent);
  together(
      [&] {
        CHECK_THROWS(Fault::peer_lost, "did not accept",
                     connect_lanes(accepting.endpoint(), std::string(32, 'x'), 1, soon()));
      },
      [&] { CHECK_THROWS(Fault::peer_lost, "no data connection", accepting.accept(Deadline::after(second / 2))); });
  for (const std::string& wrong :
       {std::string("unix:"), std::string("unix:@"), std::string("unix:/tmp/x"), "unix:@" + std::string(108, 'n')})
    CHECK_THROWS(Fault::usage, "is no endpoint", connect_lanes(wrong, token, 1, soon()));
  CHECK_THROWS(Fault::peer_lost, "cannot connect", connect_lanes("unix:@kvxfer-nobody", token, 1, soon()));
}

TEST(lane, carries_descriptors_over_unix_sockets) {
  int ends[2];
  CHECK_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
  const Socket here(ends[0]), there(ends[1]);
  const int unused = ::dup(0);
  ::close(unused);
  const auto send_byte = [&](int descriptor) {
    char byte = 'd';
    iovec vector{&byte, 1};
    CHECK_EQ(send_vectors(here.fd(), &vector, 1, descriptor), 0);
  };
  char got = 0;
  Socket came;
  send_byte(here.fd());
  CHECK_EQ(receive_with_descriptor(there.fd(), &got, 1, came), 0);
  CHECK(came.open() && came.fd() == unused && (::fcntl(came.fd(), F_GETFD) & FD_CLOEXEC) != 0);
  send_byte(-1);
  CHECK_EQ(receive_with_descriptor(there.fd(), &got, 1, came), 0);
  CHECK(!came.open());
  for (int round = 0; round < 3; ++round) {  // one that nobody wants is closed
    send_byte(here.fd());
    CHECK_EQ(receive_all(there.fd(), &got, 1), 0);
  }
  const int still_unused = ::dup(0);
  ::close(still_unused);
  CHECK_EQ(still_unused, unused);
}

TEST(lane, a_wrong_token_is_dropped_before_anything_is_parsed) {
  Server server;
  for (const std::size_t at : {0U, 15U, 31U}) {
    std::string wrong = token;
    wrong[at] ^= 1;
    const Socket one = stranger(server.endpoint);
    say(one, wrong);
    CHECK(dropped(one));
  }
  const Socket zeros = stranger(server.endpoint);
  say(zeros, std::string(4096, '\0'));
  CHECK(dropped(zeros));
  CHECK_THROWS(Fault::peer_lost, "did not accept", connect_lanes(server.endpoint, std::string(32, 'x'), 2, soon()));
  CHECK_EQ(connect_lanes(server.endpoint, token, 2, soon()).size(), 2U);
}

TEST(lane, a_cut_or_late_token_is_dropped_and_disturbs_nobody) {
  Server server;
  const Socket late = stranger(server.endpoint);
  say(late, token.substr(0, 31));
  {
    const Socket cut = stranger(server.endpoint);
    say(cut, token.substr(0, 7));
  }
  const Nanoseconds began = now_ns();
  CHECK(dropped(late));
  CHECK(now_ns() - began < 5 * second);
  const Socket hello_cut = stranger(server.endpoint);
  say(hello_cut, token + hello(lane_protocol, 0, 1, 1).substr(0, 23));
  CHECK_EQ(connect_lanes(server.endpoint, token, 2, soon()).size(), 2U);
  server.wait();
  CHECK_EQ(server.lanes.size(), 2U);
}

TEST(lane, a_malformed_hello_is_dropped) {
  Server server;
  std::string no_magic = hello(lane_protocol, 0, 1, 1);
  no_magic[0] = 'X';
  const Socket first = stranger(server.endpoint);
  say(first, token + no_magic);
  CHECK(dropped(first));
  for (const auto& [lane, lanes] : {std::pair{0, 0}, {1, 1}, {0, 65}, {7, 3}}) {
    const Socket one = stranger(server.endpoint);
    say(one, token + hello(lane_protocol, static_cast<std::uint16_t>(lane), static_cast<std::uint16_t>(lanes), 1));
    char answer[24];
    CHECK_EQ(receive_all(one.fd(), answer, sizeof answer), 0);
    CHECK(dropped(one));
  }
  CHECK_EQ(connect_lanes(server.endpoint, token, 1, soon()).size(), 1U);
}

TEST(lane, another_protocol_version_is_an_error_on_the_listening_side) {
  Server server;
  const Socket one = stranger(server.endpoint);
  say(one, token + hello(lane_protocol + 1, 0, 1, 1));
  server.wait();
  CHECK(server.fault == Fault::usage);
  CHECK(server.error.find("speaks protocol 2, this side 1") != std::string::npos);
}

// Whatever listens there answers as given.
void check_answer(const std::string& answer, Fault fault, const std::string& part) {
  const Socket listening(::socket(AF_INET, SOCK_STREAM, 0));
  sockaddr_in at{};
  at.sin_family = AF_INET;
  at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof at;
  CHECK(::bind(listening.fd(), reinterpret_cast<const sockaddr*>(&at), length) == 0);
  CHECK(::listen(listening.fd(), 4) == 0);
  ::getsockname(listening.fd(), reinterpret_cast<sockaddr*>(&at), &length);
  const std::jthread other([&] {
    const Socket one(::accept(listening.fd(), nullptr, nullptr));
    char said[56];
    receive_all(one.fd(), said, sizeof said);
    send_all(one.fd(), answer.data(), answer.size());
  });
  CHECK_THROWS(fault, part, connect_lanes("127.0.0.1:" + std::to_string(ntohs(at.sin_port)), token, 1, soon()));
}

TEST(lane, the_connecting_side_judges_the_answer) {
  check_answer(hello(9, 0, 0, 0), Fault::usage, "speaks protocol 9, this side 1");
  check_answer("HTTP/1.1 400 Bad Request\r\n", Fault::usage, "is no kvxfer data port");
  check_answer("KVXF", Fault::peer_lost, "did not accept the data connection");
}

TEST(lane, seventy_silent_connections_do_not_keep_out_a_client) {
  Server server;
  std::vector<Socket> silent;
  for (int i = 0; i < 70; ++i) silent.push_back(stranger(server.endpoint));
  const Nanoseconds began = now_ns();
  CHECK_EQ(connect_lanes(server.endpoint, token, 8, soon()).size(), 8U);
  server.wait();
  CHECK_EQ(server.lanes.size(), 8U);
  CHECK(now_ns() - began < 2 * second);
}

TEST(lane, a_client_that_stops_halfway_does_not_keep_out_the_next) {
  Server server;
  const Socket half = stranger(server.endpoint);
  say(half, token + hello(lane_protocol, 0, 3, 77));
  char answer[24];
  CHECK_EQ(receive_all(half.fd(), answer, sizeof answer), 0);
  CHECK_EQ(connect_lanes(server.endpoint, token, 3, soon()).size(), 3U);
  server.wait();
  CHECK_EQ(server.lanes.size(), 3U);
}

TEST(lane, clients_that_come_at_the_same_time_are_all_served) {
  LaneListener listener("127.0.0.1", 0, token);
  constexpr std::size_t clients = 6;
  std::vector<std::vector<Socket>> theirs(clients);
  std::vector<std::jthread> threads;
  for (std::size_t i = 0; i < clients; ++i)
    threads.emplace_back([&, i] { theirs[i] = connect_lanes(listener.endpoint(), token, 4, soon()); });
  std::vector<std::vector<Socket>> mine;
  for (std::size_t i = 0; i < clients; ++i) mine.push_back(listener.accept(soon()));
  threads.clear();
  std::size_t joined = 0;
  for (const auto& lanes : theirs) joined += lanes.size();
  CHECK_EQ(joined, 4 * clients);
}

TEST(lane, accept_ends_at_its_deadline_and_when_interrupted) {
  Server in_time(50'000'000);
  in_time.wait();
  CHECK(in_time.fault == Fault::peer_lost);
  CHECK(in_time.error.find("in time") != std::string::npos);

  Server interrupted;
  interrupted.listener.interrupt();
  interrupted.wait();
  CHECK(interrupted.fault == Fault::peer_lost);
  CHECK(interrupted.error.find("interrupted") != std::string::npos);
}

TEST(lane, unreachable_and_malformed_endpoints) {
  std::string gone;
  {
    const LaneListener listener("127.0.0.1", 0, token);
    gone = listener.endpoint();
  }
  CHECK_THROWS(Fault::peer_lost, "cannot connect to the peer's data port at " + gone,
               connect_lanes(gone, token, 1, soon()));
  CHECK_THROWS(Fault::peer_lost, "cannot resolve", connect_lanes("no.such.host.invalid:1", token, 1, soon()));
  for (const char* wrong : {"", "host", ":5", "host:", "host:x", "host:70000", "host:0", "host:12x"})
    CHECK_THROWS(Fault::usage, "is no endpoint", connect_lanes(wrong, token, 1, soon()));
}

TEST(lane, a_listener_that_never_answers_costs_the_deadline) {
  const LaneListener listener("127.0.0.1", 0, token);
  const Nanoseconds began = now_ns();
  CHECK_THROWS(Fault::peer_lost, "did not accept",
               connect_lanes(listener.endpoint(), token, 2, Deadline::after(100'000'000)));
  CHECK(now_ns() - began < 5 * second);
}

TEST(lane, a_port_in_use_and_an_address_of_another_host_are_refused) {
  const LaneListener listener("127.0.0.1", 0, token);
  const std::uint16_t port = port_of(listener.endpoint());
  CHECK_THROWS(Fault::unavailable, "cannot listen on 127.0.0.1 port " + std::to_string(port),
               LaneListener("127.0.0.1", port, token));
  CHECK_THROWS(Fault::unavailable, "cannot listen", LaneListener("192.0.2.1", 0, token));
  CHECK_THROWS(Fault::unavailable, "cannot resolve", LaneListener("no.such.host.invalid", 0, token));
}

TEST(lane, a_name_with_several_addresses_is_tried_to_the_end) {
  Server server;  // on 127.0.0.1, while localhost may be ::1 first
  CHECK_EQ(connect_lanes("localhost:" + std::to_string(port_of(server.endpoint)), token, 1, soon()).size(), 1U);
}

TEST(lane, a_silent_name_server_costs_the_deadline_at_most) {
  const Nanoseconds began = now_ns();
  const std::string endpoint = std::string(silent) + ":1";
  CHECK_THROWS(Fault::peer_lost, "no name server answers in time",
               connect_lanes(endpoint, token, 1, Deadline::after(100'000'000)));
  const Socket interrupt(::eventfd(1, EFD_CLOEXEC));
  CHECK_THROWS(Fault::peer_lost, "cannot resolve", connect_lanes(endpoint, token, 1, soon(), interrupt.fd()));
  CHECK(now_ns() - began < 5 * second);
  silence = false;
  silence.notify_all();
  for (int left = asking; left != 0; left = asking) asking.wait(left);
}

TEST(lane, vectors_may_hold_empty_entries) {
  int ends[2];
  CHECK(::socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0);
  const Socket a(ends[0]), b(ends[1]);
  char text[] = "abcdef";
  iovec from[] = {{text, 0}, {text, 2}, {nullptr, 0}, {text + 2, 4}, {text, 0}};
  CHECK_EQ(send_vectors(a.fd(), from, 5), 0);
  char got[7] = {};
  iovec into[] = {{got, 1}, {got, 0}, {got + 1, 5}, {nullptr, 0}};
  CHECK_EQ(receive_vectors(b.fd(), into, 4), 0);
  CHECK_EQ(std::string(got), "abcdef");
  a.shut();
  CHECK_EQ(receive_all(b.fd(), got, 1), ECONNRESET);
}

}  // namespace
}  // namespace kvxfer::test
