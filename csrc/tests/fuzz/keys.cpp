// Keys of a peer, which come over the control channel, and a plan that names a region of theirs: refused, or taken.
#include <cstring>
#include <memory>
#include <string>
#include <utility>

#include "backend/lane_peer.h"
#include "tests/fuzz/target.h"
#include "tests/pair.h"

namespace kvxfer::test {
namespace {

constexpr std::uint64_t region_bytes = 1 << 12;

// One side of a pair that was made once; no plan that is made here moves anything.
class Importer {
 public:
  void take(const std::string& keys) {
    try {
      pair_.a.peer->import_keys(keys);
    } catch (const Error& error) {
      if (error.fault() != Fault::usage) throw;
      return;
    }
    // Whatever was taken, a plan stays inside of it: no key says that this offset lies in a region.
    const std::vector<std::uint32_t> local{0}, remote{0}, starts{0};
    const std::vector<std::uint64_t> from{0}, to{UINT64_MAX - 8}, lengths{region_bytes};
    try {
      pair_.a.context->prepare(*pair_.a.peer, {local, from, remote, to, lengths, starts}, Deadline::after(0));
    } catch (const Error& error) {
      if (error.fault() == Fault::usage) return;
    }
    throw Failure("a plan beyond the end of every region was taken");
  }

 private:
  Pair pair_{region_bytes};
};

}  // namespace
}  // namespace kvxfer::test

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static kvxfer::test::Importer importer;
  importer.take({reinterpret_cast<const char*>(data), size});
  return 0;
}

extern "C" std::size_t LLVMFuzzerCustomMutator(std::uint8_t* data, std::size_t size, std::size_t max_size,
                                               unsigned seed) {
  static constexpr std::uint32_t magic = 0x4b58564b;
  const kvxfer::RegionKey entry{seed % 3, seed % 5, seed % 2 == 0 ? UINT64_MAX - seed % 7 : seed, seed};
  if (size < sizeof magic && max_size >= sizeof magic) {
    std::memcpy(data, &magic, sizeof magic);
    return sizeof magic;
  }
  if (seed % 4 == 0 || size + sizeof entry > max_size) return LLVMFuzzerMutate(data, size, max_size);
  std::memcpy(data + size, &entry, sizeof entry);
  return size + sizeof entry;
}
