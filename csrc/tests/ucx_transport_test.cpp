// What UCX says of transports and protocols, read from its words.
#include "backends/ucx/transport.h"
#include "tests/check.h"

namespace kvxfer::test {
namespace {

void check(const std::string& said, const std::string& how, const std::string& transport) {
  const auto read = ucx::read_protocol(said);
  CHECK(read.has_value());
  CHECK_EQ(read->how, how);
  CHECK_EQ(read->transport, transport);
}

TEST(ucx_transport, protocols_of_one_transport) {
  check("{proto|init} put from host memory length 65536 zero-copy tcp/lo 11.8 MB/s 5307.05 us", "zero-copy", "tcp/lo");
  check("{cpml|proto|init} put from host memory length 100 short posix/memory 868.3 MB/s 0.11 us", "short",
        "posix/memory");
  check("{init} put from cuda/GPU0 to cuda length 65536 zero-copy cuda_ipc/cuda 9 MB/s 1 us", "zero-copy",
        "cuda_ipc/cuda");
  check("get into cuda/GPU0 memory length 7 software emulation rc_mlx5/mlx5_0:1/path0 11.6 MB/s 2 us",
        "software emulation", "rc_mlx5/mlx5_0:1");
  check("put from host memory length 1 (?) multi-frag copy-in tcp/eth0", "multi-frag copy-in", "tcp/eth0");
}

TEST(ucx_transport, protocols_of_several_transports) {
  check(
      "put from host memory length 1048576 zero-copy 30% on rc_mlx5/mlx5_0:1/path0 and 70% on rc_mlx5/mlx5_1:1/path1 "
      "9 MB/s 1 us",
      "zero-copy", "rc_mlx5/mlx5_0:1+rc_mlx5/mlx5_1:1");
  check("put from host memory length 9 zero-copy 50% on rc/mlx5_0:1/path0 and 50% on rc/mlx5_0:1/path1 9 MB/s 1 us",
        "zero-copy", "rc/mlx5_0:1");
}

TEST(ucx_transport, words_without_a_transport_tell_nothing) {
  for (const char* said : {"", "flags:0x1 <no debug info>", "{init} put from host memory length", "length 65536",
                           "put from host memory length 65536 zero-copy 11.8 MB/s 5307.05 us"})
    CHECK(!ucx::read_protocol(said).has_value());
}

TEST(ucx_transport, lanes_by_their_use) {
  const std::string printed =
      "#                 lane[0]:  2:posix/memory.0 md[1]   -> md[1]/posix/sysdev[255] seg 8192 am\n"
      "#                 lane[1]:  1:tcp/lo.0 md[0]         -> md[0]/tcp/sysdev[255] seg 8192 rma_bw#0\n"
      "#                 lane[2]:  0:tcp/eth0.100.0 md[0]   -> md[0]/tcp/sysdev[255] seg 8192 rma_bw#1 wireup\n"
      "# a line of something else\n";
  CHECK_EQ(ucx::lanes_for("rma", printed), "tcp/lo+tcp/eth0.100");
  CHECK_EQ(ucx::lanes_for("am", printed), "posix/memory");
  CHECK_EQ(ucx::lanes_for("rma", ""), "");
}

TEST(ucx_transport, each_is_named_once) {
  std::string all;
  for (const char* one : {"tcp/lo", "tcp/l", "tcp/lo", "tcp/lo2"}) ucx::add(all, one);
  CHECK_EQ(all, "tcp/lo+tcp/l+tcp/lo2");
}

}  // namespace
}  // namespace kvxfer::test
