// How a thread that has nothing to do waits for news: by asking for it again, or asleep.
#pragma once

#include "backend/clock.h"

namespace kvxfer::ucx {

// Being woken takes longer than a piece: a thread that sleeps between two pieces is late for each, and within a host
// may be woken on the CPU that the other side runs on. So it asks again, for so long at most, where news have lately
// come as soon as that; where they have not, it sleeps at once and costs nothing.
class Patience {
 public:
  explicit Patience(Nanoseconds longest_asking) : longest_asking_(longest_asking) {}

  bool waits() const { return since_ != never; }

  // There is nothing to do. True: ask again; false: sleep.
  bool ask_again(Nanoseconds now) {
    if (!waits()) since_ = now;
    if (soon_ && now - since_ >= longest_asking_) soon_ = false;  // in vain
    asks_ = soon_;
    return asks_;
  }

  // The wait is over.
  void news(Nanoseconds now) {
    const Nanoseconds waited = now - since_;
    since_ = never;
    // Asleep it has waited for its being woken too.
    soon_ = waited < (asks_ ? longest_asking_ : with_waking * longest_asking_);
  }

 private:
  static constexpr Nanoseconds never = -1;
  static constexpr Nanoseconds with_waking = 4;

  Nanoseconds longest_asking_;
  Nanoseconds since_ = never;
  bool asks_ = false;  // rather than sleeps, in this wait
  bool soon_ = false;  // news have come soon, the last time
};

}  // namespace kvxfer::ucx
