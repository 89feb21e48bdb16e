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

// A number and a factor. A product with a number that is the same for all pairs changes only the
// factor, which the compiler then computes once. A type of more than 16 bits has no factor.
template <class Real, bool exact>
struct Factored {
  Real number;
  Real factor;
  Factored() = default;
  __device__ Factored(Real number, Real factor = 1) : number(number), factor(factor) {}
  __device__ Real all() const { return number * factor; }
  __device__ Real rounded() const { return rounded_product(number, factor); }
  __device__ Factored operator-() const { return {-number, factor}; }
  __device__ Factored operator*(Real b) const { return {number, factor * b}; }
  __device__ Factored operator/(Real b) const { return {number, quotient<exact>(factor, b)}; }
  // For a number that differs from pair to pair.
  __device__ Factored with(Real b) const { return {b * number, factor}; }
};
template <class Real>
struct Factored<Real, true> {
  Real number;
  Factored() = default;
  __device__ Factored(Real number) : number(number) {}
  __device__ Factored(Real number, Real factor) : number(rounded_product(number, factor)) {}
  __device__ Real all() const { return number; }
  __device__ Real rounded() const { return number; }
  __device__ Factored operator-() const { return {-number}; }
  __device__ Factored operator*(Real b) const { return {number * b}; }
  __device__ Factored operator/(Real b) const { return {quotient<true>(number, b)}; }
  __device__ Factored with(Real b) const { return {b * number}; }
};

template <class Real, bool exact>
struct Dual {
  using Part = Factored<Real, exact>;
  Part of_value;
  Part of_slope;

  Dual() = default;
  __device__ Dual(Real value) : of_value(value), of_slope(Real(0)) {}
  __device__ Dual(Part value, Part slope) : of_value(value), of_slope(slope) {}
  __device__ Real value() const { return of_value.rounded(); }
  __device__ Real slope() const { return of_slope.all(); }

  __device__ friend Dual operator-(Dual a) { return {-a.of_value, -a.of_slope}; }
  __device__ friend Dual operator+(Dual a) { return a; }

  __device__ friend Dual operator+(Dual a, Dual b) {
    return {a.value() + b.value(), a.slope() + b.slope()};
  }
  __device__ friend Dual operator+(Dual a, Real b) { return {a.value() + b, a.of_slope}; }
  __device__ friend Dual operator+(Real a, Dual b) { return {a + b.value(), b.of_slope}; }

  __device__ friend Dual operator-(Dual a, Dual b) {
    return {a.value() - b.value(), a.slope() - b.slope()};
  }
  __device__ friend Dual operator-(Dual a, Real b) { return {a.value() - b, a.of_slope}; }
  __device__ friend Dual operator-(Real a, Dual b) { return {a - b.value(), -b.of_slope}; }

  __device__ friend Dual operator*(Dual a, Dual b) {
    const Real x = a.value(), y = b.value();
    return {x * y, fma(a.slope(), y, x * b.slope())};
  }
  __device__ friend Dual operator*(Dual a, Real b) { return {a.of_value * b, a.of_slope * b}; }
  __device__ friend Dual operator*(Real a, Dual b) { return {b.of_value * a, b.of_slope * a}; }

  __device__ friend Dual operator/(Dual a, Dual b) {
    const Real x = b.value(), value = quotient<exact>(a.value(), x);
    return {value, quotient<exact>(fma(-value, b.slope(), a.slope()), x)};
  }
  __device__ friend Dual operator/(Dual a, Real b) { return {a.of_value / b, a.of_slope / b}; }
  __device__ friend Dual operator/(Real a, Dual b) {
    const Real x = b.value(), value = quotient<exact>(a, x);
    return {value, quotient<exact>(-value * b.slope(), x)};
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
  __device__ friend bool operator<(Dual a, Dual b) { return a.value() < b.value(); }
  __device__ friend bool operator>(Dual a, Dual b) { return a.value() > b.value(); }
  __device__ friend bool operator<=(Dual a, Dual b) { return a.value() <= b.value(); }
  __device__ friend bool operator>=(Dual a, Dual b) { return a.value() >= b.value(); }
  __device__ friend bool operator==(Dual a, Dual b) { return a.value() == b.value(); }
  __device__ friend bool operator!=(Dual a, Dual b) { return a.value() != b.value(); }
};

// The chain rule: applies a function with this value and derivative to a dual number.
template <class Real, bool exact>
__device__ inline Dual<Real, exact> chained(Dual<Real, exact> x, Real value, Real derivative) {
  return {value, x.of_slope.with(derivative)};
}

}  // namespace cuflash
