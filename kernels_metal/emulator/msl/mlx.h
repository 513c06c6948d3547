// What MLX puts before every custom kernel and its documentation names.
#pragma once

template <typename I = uint>
inline I elem_to_loc(I element, const constant int* shape, const constant int64_t* strides, int ndim) {
  I location = 0;
  for (int i = ndim - 1; i >= 0 && element > 0; --i) {
    location += I(element % I(shape[i])) * I(strides[i]);
    element /= I(shape[i]);
  }
  return location;
}

template <typename T, typename U>
inline T ceildiv(T n, U d) {
  return (n + d - 1) / d;
}
