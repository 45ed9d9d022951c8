#include "backend/address.h"

#include <netdb.h>
#include <poll.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <system_error>
#include <thread>

#include "backend/lane.h"

namespace kvxfer {

namespace {

// What is asked, and in the end the answer. Outlives whoever waits for it.
struct Resolution {
  std::string host;
  std::string port;
  addrinfo hints{};
  Socket done{::eventfd(0, EFD_CLOEXEC)};
  addrinfo* found = nullptr;
  std::atomic<int> code{0};

  Resolution(std::string name, std::string number, bool passive) : host(std::move(name)), port(std::move(number)) {
    hints.ai_family = AF_UNSPEC;
    hints.ai_socktype = SOCK_STREAM;
    hints.ai_flags = AI_NUMERICSERV | (passive ? AI_PASSIVE : 0);
  }
  Resolution(const Resolution&) = delete;
  Resolution& operator=(const Resolution&) = delete;
  ~Resolution() {
    if (found != nullptr) ::freeaddrinfo(found);
  }

  void ask() { code = ::getaddrinfo(host.c_str(), port.c_str(), &hints, &found); }
  // Numbers and the lack of a name need nobody's answer.
  bool ask_nobody() {
    hints.ai_flags |= AI_NUMERICHOST;
    ask();
    hints.ai_flags &= ~AI_NUMERICHOST;
    return code == 0;
  }
};

// A resolver that does not answer keeps a thread for as long as the C library waits (half a minute, typically), and
// there is no way to end that.
void ask_aside(const std::shared_ptr<Resolution>& asked) {
  std::thread([asked] {
    sigset_t all;
    ::sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, nullptr);  // signals are for the application's threads
    asked->ask();
    const std::uint64_t one = 1;
    [[maybe_unused]] const auto written = ::write(asked->done.fd(), &one, sizeof one);
  }).detach();
}

}  // namespace

Address local_address(const std::string& endpoint) {
  Address address;
  auto* local = reinterpret_cast<sockaddr_un*>(&address.storage);
  const std::string name = endpoint.substr(local_scheme.size());
  if (name.size() < 2 || name[0] != '@' || name.size() > sizeof local->sun_path)
    throw Error(Fault::usage, "'" + endpoint + "' is no endpoint; unix:@name is");
  local->sun_family = AF_UNIX;
  std::memcpy(local->sun_path + 1, name.data() + 1, name.size() - 1);
  address.length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + name.size());
  return address;
}

std::vector<Address> resolve(const std::string& host, const std::string& port, bool passive, Fault fault,
                             Deadline deadline, int interrupt) {
  const auto asked = std::make_shared<Resolution>(host, port, passive);
  if (!asked->done.open()) throw system_error(Fault::unavailable, "no event descriptor (eventfd)", errno);
  const std::string failed = "cannot resolve '" + host + "': ";
  if (!asked->ask_nobody()) {
    try {
      ask_aside(asked);
    } catch (const std::system_error&) {
      throw Error(Fault::unavailable, failed + "no more threads to be had");
    }
    const int code = wait_for(asked->done.fd(), POLLIN, deadline, interrupt);
    if (code == ETIMEDOUT) throw Error(fault, failed + "no name server answers in time; give a number");
    if (code != 0) throw system_error(fault, failed + "the wait for a name server", code);
    if (asked->code != 0) throw Error(fault, failed + ::gai_strerror(asked->code));
  }
  std::vector<Address> addresses;
  for (const addrinfo* one = asked->found; one != nullptr; one = one->ai_next) {
    Address& address = addresses.emplace_back();
    address.length = one->ai_addrlen;
    std::memcpy(&address.storage, one->ai_addr, one->ai_addrlen);
  }
  return addresses;
}

}  // namespace kvxfer
