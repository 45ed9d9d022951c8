// A module of UCX that needs a libibverbs, for ucx_bundled_test.cpp.
extern "C" const char* whose_verbs();
extern "C" const char* verbs_in_use() { return whose_verbs(); }
extern "C" const char module_needs[] = "IBVERBS_1.0\0IBVERBS_1.1";
