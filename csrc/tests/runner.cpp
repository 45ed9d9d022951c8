#include <unistd.h>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <string>
#include <utility>

#include "backend/clock.h"
#include "backends/ucx/ucx.h"
#include "tests/check.h"

namespace kvxfer::test {

std::vector<Case>& cases() {
  static std::vector<Case> all;
  return all;
}

bool add(std::string name, std::function<void()> run) {
  cases().push_back({std::move(name), std::move(run)});
  return true;
}

namespace {

[[maybe_unused]] const bool looked_for_libraries = (ucx::look_in({KVXFER_PACKAGES}), true);

constexpr unsigned seconds_per_case = 120;  // far more than any needs, sanitizers and a busy machine included
const char* running = "";

void too_late(int) {
  for (const char* text : {"HANGS   ", running, "\n"}) [[maybe_unused]]
    const auto written = ::write(STDOUT_FILENO, text, std::strlen(text));
  ::_exit(1);
}

bool passes(const Case& one) {
  running = one.name.c_str();
  ::alarm(seconds_per_case);
  const Nanoseconds began = now_ns();
  std::string why;
  try {
    one.run();
  } catch (const std::exception& error) {
    why = error.what();
  }
  ::alarm(0);
  std::printf("%s  %s (%lld ms)\n", why.empty() ? "ok    " : "FAILED", one.name.c_str(),
              static_cast<long long>((now_ns() - began) / 1'000'000));
  if (!why.empty()) std::printf("        %s\n", why.c_str());
  std::fflush(stdout);
  return why.empty();
}

}  // namespace

int run_cases(int argc, char** argv) {
  const std::string filter = argc > 1 ? argv[1] : "";
  std::signal(SIGALRM, too_late);
  int passed = 0;
  int failed = 0;
  for (const Case& one : cases()) {
    if (filter == "--list") {
      std::printf("%s\n", one.name.c_str());
    } else if (one.name.find(filter) != std::string::npos) {
      ++(passes(one) ? passed : failed);
    }
  }
  if (filter == "--list") return 0;
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed > 0 || passed == 0 ? 1 : 0;
}

}  // namespace kvxfer::test

// ThreadSanitizer does not see that what the other side has received was read here before: between a lane's sendmsg and
// the next stamp of the same memory there are sockets, and no lock of this process.
extern "C" const char* __tsan_default_suppressions() { return "race:kvxfer::stamp\n"; }
