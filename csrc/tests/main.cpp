#include "tests/check.h"

int main(int argc, char** argv) { return kvxfer::test::run_cases(argc, argv); }
