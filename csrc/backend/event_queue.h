// Where a context's threads put events and its application takes them. Fixed room: nothing allocates while data moves.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <mutex>
#include <span>
#include <vector>

#include "backend/backend.h"

namespace kvxfer {

class EventQueue {
 public:
  explicit EventQueue(std::size_t capacity);
  ~EventQueue();
  EventQueue(const EventQueue&) = delete;
  EventQueue& operator=(const EventQueue&) = delete;

  // Keeps room that push_last() alone may use: the end of a transfer or of a peer is told even when all else is full.
  void reserve(std::size_t last_events);
  // False when there is no room: the application does not poll, or the peer floods it.
  bool push(const Event& event);
  void push_last(const Event& event);
  std::size_t pop(std::span<Event> events, Deadline deadline);
  // The next pop() takes these first, in this order; what there is no room for is dropped.
  void put_back(std::span<const Event> events);
  // From now on pop() takes what there is and waits no more.
  void stop_waiting();
  // Readable while events wait. Made on the first call; costs a system call per event from then on.
  int descriptor();

 private:
  void append(const Event& event);  // with mutex_ held
  void grown();                     // by one event; with mutex_ held

  std::mutex mutex_;
  std::condition_variable filled_;
  std::vector<Event> ring_;
  std::size_t head_ = 0;
  std::size_t size_ = 0;
  std::size_t reserved_ = 0;
  bool waiting_over_ = false;
  int descriptor_ = -1;
};

}  // namespace kvxfer
