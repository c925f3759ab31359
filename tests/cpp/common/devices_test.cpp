#include "common/devices.h"

#include <gtest/gtest.h>

namespace oomb {
namespace {

TEST(CudaStatus, NeverThrowsAndExplainsAMissingDevice) {
  const CudaStatus status = cuda_status();
  EXPECT_EQ(status.built, static_cast<bool>(OOMB_WITH_CUDA));
  EXPECT_EQ(status.devices.empty(), !status.problem.empty());
  EXPECT_EQ(status.problem == "built without CUDA", !status.built);
}

}  // namespace
}  // namespace oomb
