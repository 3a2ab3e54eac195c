#define HEADWISE_ISA portable
#define HEADWISE_VECTORS "vec_portable.h"
#include "isa.inl"
