// kvxfer_conformance [FILTER]: every check over every backend of this build, as BACKEND/CHECK; --list names them.
#include <cstdio>
#include <memory>

#include "backend/registry.h"
#include "backend/skeleton/skeleton.h"
#include "tests/conformance/suite.h"
#include "tests/doubles/doubles.h"

namespace kvxfer::test {
namespace {

void add_checks_of(const char* name, const Opener& open) {
  const auto subject = std::make_shared<const Subject>(name, open);
  for (const BackendCheck& check : backend_checks())
    if (check.applies(subject->can)) add(subject->name + "/" + check.name, [subject, check] { check.run(*subject); });
}

}  // namespace
}  // namespace kvxfer::test

int main(int argc, char** argv) {
  using namespace kvxfer;
  for (const BackendRow& row : backends()) {
    const Probe found = row.probe();
    if (found.available)
      test::add_checks_of(row.name, [&row] { return row.open(test::token, {}); });
    else
      std::printf("skipped %s: %s\n", row.name, found.why_not.c_str());
  }
  // By another way than the default, with ends of its own for what it sends.
  test::add_checks_of("tcp.zerocopy", [] { return find_backend("tcp").open(test::token, {{"zerocopy", 1}}); });
  // In no registry: the one to copy, and one that moves nothing unless it is armed and polled on both sides.
  test::add_checks_of("skeleton", [] { return skeleton::open(test::token, {}); });
  test::add_checks_of("two_sided", test::two_sided);
  return test::run_cases(argc, argv);
}
