// Preloaded into a process: each look at the clock of the day is KVXFER_JUMP_S seconds away from the one before, as if
// somebody set it in between. The monotonic clock goes on as ever.
#include <sys/syscall.h>
#include <sys/time.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <ctime>

namespace {

std::atomic<long> looks{0};

timespec jumped() {
  static const long step = std::atol(std::getenv("KVXFER_JUMP_S"));
  timespec now{};
  ::syscall(SYS_clock_gettime, CLOCK_REALTIME, &now);
  now.tv_sec += step * looks.fetch_add(1);
  return now;
}

}  // namespace

extern "C" {

int clock_gettime(clockid_t which, timespec* into) {
  if (which != CLOCK_REALTIME && which != CLOCK_REALTIME_COARSE)
    return static_cast<int>(::syscall(SYS_clock_gettime, which, into));
  *into = jumped();
  return 0;
}

int gettimeofday(timeval* into, void*) {
  const timespec now = jumped();
  *into = {now.tv_sec, now.tv_nsec / 1000};
  return 0;
}

time_t time(time_t* into) {
  const time_t now = jumped().tv_sec;
  if (into != nullptr) *into = now;
  return now;
}
}
