// The peers' pools that a context has mapped.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "memory/mapping.h"

namespace kvxfer::shm {

// Why a descriptor is not memory that can be relied on, "" when it is: it must be shared memory of small or transparent
// huge pages that holds `bytes`, and sealed against becoming shorter, or its owner could end this process by a signal.
// All its pages must be there, or mapping it would make memory that this process is charged for. What the owner can
// still do is to take pages away later: then zeros appear in their place, and cost memory when they are touched.
std::string why_unfit(int descriptor, std::uint64_t bytes);

// Several peers of a context may live in one process and show the same pool: it is mapped once.
class PeerPools {
 public:
  // Throws Error(unavailable) when it cannot be mapped.
  std::shared_ptr<const Mapping> map(int descriptor, std::uint64_t bytes);

 private:
  using Identity = std::pair<std::uint64_t, std::uint64_t>;  // device and inode

  std::mutex mutex_;
  std::map<Identity, std::weak_ptr<const Mapping>> known_;
};

}  // namespace kvxfer::shm
