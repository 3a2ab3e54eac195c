#define HEADWISE_ISA avx512
#define HEADWISE_VECTORS "vec_avx512.h"
#include "isa.inl"
