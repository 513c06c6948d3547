// x [rows, N] T, weight [N] T, eps float32: out [rows, N] T. A threadgroup of any number of whole simdgroups to a row.
threadgroup float sums[32];
const uint row = threadgroup_position_in_grid.y;
const uint thread_in_row = thread_index_in_threadgroup;
const uint threads = threads_per_threadgroup.x;
const device T* from = x + row * N;
float sum = 0;
for (uint i = thread_in_row; i < N; i += threads) sum += float(from[i]) * float(from[i]);
sum = simd_sum(sum);
if (thread_index_in_simdgroup == 0) sums[simdgroup_index_in_threadgroup] = sum;
threadgroup_barrier(mem_flags::mem_threadgroup);
sum = simd_sum(thread_index_in_simdgroup < simdgroups_per_threadgroup ? sums[thread_index_in_simdgroup] : 0.0f);
const float factor = metal::precise::rsqrt(sum / N + eps);
for (uint i = thread_in_row; i < N; i += threads) out[row * N + i] = static_cast<T>(float(from[i]) * factor * float(weight[i]));
