// Nothing is launched here.
#pragma once

#include "device.h"
//
#include "common/status.h"

namespace pallas_attn {

enum class Blocks { kIndependent, kCooperative, kInPairs };

template <typename... Parameters>
LaunchStatus launch_dependent(Parameters...);

}  // namespace pallas_attn
