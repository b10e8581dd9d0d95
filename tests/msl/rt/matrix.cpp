// The product of 8x8 matrices spread over a SIMD-group (lane layout and operands as in shim/mtl/matrix.h).
#include <math.h>
#include <string.h>

#include "state.h"

extern "C" void mtl_matrix_product(Exchange *exchange) {
  float a[8][8], b[8][8], d[8][8];
  for (u32 lane = 0; lane < SIMD_WIDTH; ++lane) {
    u32 quad = lane / 4, row = (quad & 4) + ((lane / 2) & 3), column = (quad & 2) * 2 + (lane & 1) * 2;
    float operands[3][2];
    memcpy(operands, exchange->slot[lane], sizeof operands);
    memcpy(&a[row][column], operands[0], sizeof operands[0]);
    memcpy(&b[row][column], operands[1], sizeof operands[1]);
    memcpy(&d[row][column], operands[2], sizeof operands[2]);
  }
  for (u32 r = 0; r < 8; ++r)
    for (u32 k = 0; k < 8; ++k)
      for (u32 c = 0; c < 8; ++c) d[r][c] = fmaf(a[r][k], b[k][c], d[r][c]);
  memcpy(exchange->result, d, sizeof d);
  exchange->ready = 1;
  group.launch->matrix_products++;
}
