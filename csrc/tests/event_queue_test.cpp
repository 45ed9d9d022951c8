#include "backend/event_queue.h"

#include <poll.h>

#include <array>
#include <thread>

#include "tests/check.h"

namespace kvxfer::test {
namespace {

constexpr Nanoseconds second = 1'000'000'000;

Event event(std::uint64_t tag) { return {tag, EventKind::confirmed, 0, 0}; }

bool readable(int fd) {
  pollfd entry{fd, POLLIN, 0};
  return ::poll(&entry, 1, 0) == 1;
}

TEST(event_queue, keeps_order_and_wraps_around) {
  EventQueue queue(4);
  std::array<Event, 8> taken;
  for (std::uint64_t round = 0; round < 10; ++round) {
    for (std::uint64_t i = 0; i < 3; ++i) CHECK(queue.push(event(3 * round + i)));
    CHECK_EQ(queue.pop(taken, Deadline::after(0)), 3U);
    for (std::uint64_t i = 0; i < 3; ++i) CHECK_EQ(taken[i].tag, 3 * round + i);
  }
}

TEST(event_queue, refuses_when_full_but_tells_the_last_events) {
  EventQueue queue(2);
  CHECK(queue.push(event(1)));
  std::array<Event, 8> taken;
  CHECK_EQ(queue.pop({taken.data(), 1}, Deadline::after(0)), 1U);
  CHECK(queue.push(event(2)));
  CHECK(queue.push(event(3)));  // wraps around
  queue.reserve(2);
  CHECK(!queue.push(event(4)));
  queue.push_last(event(5));
  queue.push_last(event(6));
  CHECK_EQ(queue.pop(taken, Deadline::after(0)), 4U);
  const std::array<std::uint64_t, 4> tags{2, 3, 5, 6};
  for (std::size_t i = 0; i < 4; ++i) CHECK_EQ(taken[i].tag, tags[i]);
}

TEST(event_queue, gives_what_was_put_back_first) {
  EventQueue queue(4);
  std::array<Event, 8> taken;
  const std::array<Event, 2> back{event(7), event(8)};
  for (std::uint64_t round = 0; round < 10; ++round) {
    CHECK(queue.push(event(1)));
    queue.put_back(back);
    queue.put_back({});
    CHECK(queue.push(event(2)));
    CHECK_EQ(queue.pop(taken, Deadline::after(0)), 4U);
    const std::array<std::uint64_t, 4> tags{7, 8, 1, 2};
    for (std::size_t i = 0; i < 4; ++i) CHECK_EQ(taken[i].tag, tags[i]);
    CHECK(queue.push(event(3)));  // so that the next round begins elsewhere in the ring
    queue.pop(taken, Deadline::after(0));
  }
  const int fd = queue.descriptor();
  queue.put_back(back);
  CHECK(readable(fd));
  CHECK(queue.push(event(1)) && queue.push(event(2)));
  queue.put_back(back);  // no room: nothing that waits is lost
  CHECK_EQ(queue.pop(taken, Deadline::after(0)), 4U);
  CHECK_EQ(taken[3].tag, 2U);
  CHECK(!readable(fd));
}

TEST(event_queue, waits_for_the_first_and_no_longer_than_the_deadline) {
  EventQueue queue(4);
  std::array<Event, 4> taken;
  const Nanoseconds began = now_ns();
  CHECK_EQ(queue.pop(taken, Deadline::after(30'000'000)), 0U);
  CHECK(now_ns() - began >= 30'000'000);
  const std::jthread later([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    queue.push(event(9));
  });
  CHECK_EQ(queue.pop(taken, Deadline::after(10 * second)), 1U);
  CHECK_EQ(taken[0].tag, 9U);
}

TEST(event_queue, a_deadline_in_the_far_future_does_not_overflow) {
  EventQueue queue(4);
  queue.push(event(1));
  std::array<Event, 4> taken;
  CHECK_EQ(queue.pop(taken, Deadline::after(INT64_MAX)), 1U);
  CHECK(Deadline::after(INT64_MAX).milliseconds_left() == 60'000);
}

TEST(event_queue, stop_waiting_wakes_the_one_that_waits) {
  EventQueue queue(4);
  const std::jthread later([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    queue.stop_waiting();
  });
  std::array<Event, 4> taken;
  const Nanoseconds began = now_ns();
  CHECK_EQ(queue.pop(taken, Deadline::after(30 * second)), 0U);
  CHECK(now_ns() - began < 10 * second);
  queue.push_last(event(1));
  CHECK_EQ(queue.pop(taken, Deadline::after(30 * second)), 1U);  // what comes yet is still told
}

TEST(event_queue, descriptor_is_readable_while_events_wait) {
  EventQueue queue(4);
  queue.push(event(1));
  const int fd = queue.descriptor();
  CHECK_EQ(queue.descriptor(), fd);
  CHECK(readable(fd));
  std::array<Event, 1> one;
  queue.push(event(2));
  queue.pop(one, Deadline::after(0));
  CHECK(readable(fd));
  queue.pop(one, Deadline::after(0));
  CHECK(!readable(fd));
  queue.push(event(3));
  CHECK(readable(fd));
}

}  // namespace
}  // namespace kvxfer::test
