#include "backend/registry.h"

#include "tests/check.h"

namespace kvxfer::test {
namespace {

const Token token(token_bytes, 't');

TEST(registry, every_backend_probes_and_opens) {
  CHECK_EQ(backends().size(), 5U);
  for (const BackendRow& row : backends()) {
    const Probe found = row.probe();
    CHECK(found.available && found.why_not.empty());
    CHECK(row.open(token, {})->capabilities().max_inflight >= 1);
  }
}

TEST(registry, says_which_backends_stay_on_one_host) {
  for (const BackendRow& row : backends()) {
    const std::string endpoint = row.open(token, {})->listen("127.0.0.1", 0);
    CHECK_EQ(row.one_host, endpoint.starts_with("unix:@"));
  }
}

TEST(registry, an_unknown_backend_is_told_the_known_ones) {
  CHECK_THROWS(Fault::usage, "unknown backend 'ucz'; this build has tcp, ucx, shm, cma, null", find_backend("ucz"));
  CHECK_THROWS(Fault::usage, "unknown backend ''", find_backend(""));
}

TEST(registry, unknown_options_and_values_out_of_bounds_are_refused) {
  CHECK_THROWS(Fault::usage, "unknown backend option 'lanes'", find_backend("tcp").open(token, {{"lanes", 2}}));
  CHECK_THROWS(Fault::usage, "unknown backend option", find_backend("null").open(token, {{"connections", 2}}));
  CHECK_THROWS(Fault::usage, "connections=0 is outside 1…63", find_backend("tcp").open(token, {{"connections", 0}}));
  CHECK_THROWS(Fault::usage, "connections=64", find_backend("tcp").open(token, {{"connections", 64}}));
  CHECK_THROWS(Fault::usage, "pieces_per_call=1024", find_backend("tcp").open(token, {{"pieces_per_call", 1024}}));
  CHECK_THROWS(Fault::usage, "chunk_kib=-1", find_backend("tcp").open(token, {{"chunk_kib", -1}}));
  CHECK_THROWS(Fault::usage, "threads=0", find_backend("shm").open(token, {{"threads", 0}}));
  CHECK_THROWS(Fault::usage, "unknown backend option", find_backend("shm").open(token, {{"pieces_per_call", 2}}));
  CHECK_THROWS(Fault::usage, "pieces_per_call=1025", find_backend("cma").open(token, {{"pieces_per_call", 1025}}));
  CHECK(find_backend("tcp").open(token, {{"connections", 63}, {"chunk_kib", 4}, {"pieces_per_call", 1}}) != nullptr);
}

}  // namespace
}  // namespace kvxfer::test
