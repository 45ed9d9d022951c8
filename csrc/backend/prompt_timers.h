// Waits of the calling thread that end when they are due. Linux lets timers of ordinary threads be 50 µs late, to wake
// for several at once; that would be counted to each transfer that begins when a layer is computed.
#pragma once

#include <sys/prctl.h>

namespace kvxfer {

class PromptTimers {
 public:
  PromptTimers() : slack_ns_(::prctl(PR_GET_TIMERSLACK, 0, 0, 0, 0)) { ::prctl(PR_SET_TIMERSLACK, 1UL, 0, 0, 0); }
  ~PromptTimers() {
    if (slack_ns_ > 0) ::prctl(PR_SET_TIMERSLACK, static_cast<unsigned long>(slack_ns_), 0, 0, 0);
  }
  PromptTimers(const PromptTimers&) = delete;
  PromptTimers& operator=(const PromptTimers&) = delete;

 private:
  const int slack_ns_;
};

}  // namespace kvxfer
