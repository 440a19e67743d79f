#include "device.h"
#include "ops.h"
