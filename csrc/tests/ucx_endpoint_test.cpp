// The endpoint of ucx by itself: whom its listener lets in. Needs UCX's headers.
#include "backends/ucx/endpoint.h"

#include <arpa/inet.h>
#include <netinet/in.h>

#include "backends/ucx/ucx.h"
#include "tests/check.h"
#include "tests/pair.h"

namespace kvxfer::test {
namespace {

sockaddr_storage loopback(std::uint16_t port) {
  sockaddr_storage address{};
  auto& numbers = reinterpret_cast<sockaddr_in&>(address);
  numbers.sin_family = AF_INET;
  numbers.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  numbers.sin_port = htons(port);
  return address;
}

// Whether a connection request that shows this id is let in: both sides work until one of them knows.
bool is_let_in(ucx::Endpoint& listener, ucx::Endpoint& client, std::uint16_t port) {
  client.connect(loopback(port));
  client.begin_flush();
  const Deadline deadline = soon();
  while (!client.flushed() && client.status() == UCS_OK) {
    CHECK(!deadline.passed());
    listener.progress();
    client.progress();
  }
  return client.status() == UCS_OK;
}

// Who guesses the port of a listener is refused, before the client has come and afterwards.
TEST(ucx, a_listener_takes_one_client_that_shows_its_number) {
  if (!ucx::probe().available) return;
  const auto context = std::make_shared<ucx::UcpContext>(ucx::library(), ucx::Errors::peer);
  ucx::Endpoint listener(context, ucx::Errors::peer, 0);
  const std::uint16_t port = listener.listen(loopback(0), 5).value();
  ucx::Endpoint stranger(context, ucx::Errors::peer, 6), client(context, ucx::Errors::peer, 5),
      second(context, ucx::Errors::peer, 5);
  CHECK(!is_let_in(listener, stranger, port));
  CHECK(!listener.accepted());
  CHECK(is_let_in(listener, client, port));
  CHECK(listener.accepted());
  CHECK(!is_let_in(listener, second, port));
}

}  // namespace
}  // namespace kvxfer::test
