// Dual numbers: a value and its derivative with respect to the score, carried through every
// operation (forward mode of automatic differentiation; Griewank and Walther, "Evaluating
// Derivatives", 2008, chapter 3). A plain number is a constant; it has its own overloads, which do
// not compute with its zero derivative. A dual number does not convert to a plain number, because
// the derivative would be lost: such code does not compile.
#pragma once

#include "../ptx/reciprocal.cuh"
#include "numeric.cuh"

namespace cuflash {

// a / b: rounded, or within a few units in the last place by way of the reciprocal of b, which the
// compiler computes once for many quotients of the same b.
template <bool exact, class Real>
__device__ inline Real quotient(Real a, Real b) {
  if constexpr (exact) {
    return a / b;
  } else {
    return a * ptx::reciprocal_approximate(b);
  }
}

template <class Real, bool exact>
struct Dual {
  Real value;
  Real slope;

  Dual() = default;
  __device__ Dual(Real value) : value(value), slope(0) {}
  __device__ Dual(Real value, Real slope) : value(value), slope(slope) {}

  __device__ friend Dual operator-(Dual a) { return {-a.value, -a.slope}; }
  __device__ friend Dual operator+(Dual a) { return a; }

  __device__ friend Dual operator+(Dual a, Dual b) {
    return {a.value + b.value, a.slope + b.slope};
  }
  __device__ friend Dual operator+(Dual a, Real b) { return {a.value + b, a.slope}; }
  __device__ friend Dual operator+(Real a, Dual b) { return {a + b.value, b.slope}; }

  __device__ friend Dual operator-(Dual a, Dual b) {
    return {a.value - b.value, a.slope - b.slope};
  }
  __device__ friend Dual operator-(Dual a, Real b) { return {a.value - b, a.slope}; }
  __device__ friend Dual operator-(Real a, Dual b) { return {a - b.value, -b.slope}; }

  __device__ friend Dual operator*(Dual a, Dual b) {
    return {a.value * b.value, fma(a.slope, b.value, a.value * b.slope)};
  }
  __device__ friend Dual operator*(Dual a, Real b) { return {a.value * b, a.slope * b}; }
  __device__ friend Dual operator*(Real a, Dual b) { return {a * b.value, a * b.slope}; }

  __device__ friend Dual operator/(Dual a, Dual b) {
    const Real value = quotient<exact>(a.value, b.value);
    return {value, quotient<exact>(fma(-value, b.slope, a.slope), b.value)};
  }
  __device__ friend Dual operator/(Dual a, Real b) {
    return {quotient<exact>(a.value, b), quotient<exact>(a.slope, b)};
  }
  __device__ friend Dual operator/(Real a, Dual b) {
    const Real value = quotient<exact>(a, b.value);
    return {value, quotient<exact>(-value * b.slope, b.value)};
  }

  template <class T>
  __device__ Dual& operator+=(T b) {
    return *this = *this + b;
  }
  template <class T>
  __device__ Dual& operator-=(T b) {
    return *this = *this - b;
  }
  template <class T>
  __device__ Dual& operator*=(T b) {
    return *this = *this * b;
  }
  template <class T>
  __device__ Dual& operator/=(T b) {
    return *this = *this / b;
  }

  // Comparisons look at the values only.
  __device__ friend bool operator<(Dual a, Dual b) { return a.value < b.value; }
  __device__ friend bool operator>(Dual a, Dual b) { return a.value > b.value; }
  __device__ friend bool operator<=(Dual a, Dual b) { return a.value <= b.value; }
  __device__ friend bool operator>=(Dual a, Dual b) { return a.value >= b.value; }
  __device__ friend bool operator==(Dual a, Dual b) { return a.value == b.value; }
  __device__ friend bool operator!=(Dual a, Dual b) { return a.value != b.value; }
};

// The chain rule: applies a function with this value and derivative to a dual number.
template <class Real, bool exact>
__device__ inline Dual<Real, exact> chained(Dual<Real, exact> x, Real value, Real derivative) {
  return {value, derivative * x.slope};
}

}  // namespace cuflash
