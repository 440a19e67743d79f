// What the kernels include. Their target pragma stands behind it, so that no function of a header is compiled for their
// instruction set.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <cmath>
#include <limits>
#include <type_traits>
#include <utility>

#include "../kernels.h"
