#define HEADWISE_ISA avx2
#define HEADWISE_VECTORS "vec_avx2.h"
#include "isa.inl"
