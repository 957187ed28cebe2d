// Smoothing and averaging of curves.

/** Exponential smoothing with weight `w` (0: none) of the value before, for each point that stands for n steps; the
 *  start is not pulled to zero. x and n as they are. */
export function smoothed(points, w) {
  if (!w) return points.y;
  let value = 0, weight = 0;
  return points.y.map((y, i) => {
    const keep = w ** (points.n ? points.n[i] : 1);
    value = keep * value + (1 - keep) * y;
    weight = keep * weight + (1 - keep);
    return value / weight;
  });
}

/** Several curves as one: their mean, lowest and highest at every x that one of them has, between points in a straight
 *  line, within the range of each. curves: [{x, y}], with min and max where a point stands for many. */
export function band(curves) {
  const known = curves.filter((curve) => curve.x.length);
  const x = [...new Set(known.flatMap((curve) => curve.x))].sort((a, b) => a - b);
  const columns = (key) => known.map((curve) => between(curve.x, curve[key] || curve.y, x));
  const [mean, low, high] = [columns("y"), columns("min"), columns("max")];
  const found = { x: [], y: [], min: [], max: [] };
  x.forEach((at, i) => {
    const there = (all) => all.map((column) => column[i]).filter((value) => value !== null), values = there(mean);
    found.x.push(at);
    found.y.push(values.reduce((a, b) => a + b) / values.length);
    found.min.push(Math.min(...there(low)));
    found.max.push(Math.max(...there(high)));
  });
  return found;
}

function between(x, y, places) {
  const last = x.length - 1;
  let i = 0;
  return places.map((at) => {
    while (i < last && x[i + 1] <= at) i++;
    if (at < x[0] || at > x[last]) return null;
    if (x[i] === at || i === last) return y[i];
    return y[i] + ((at - x[i]) / (x[i + 1] - x[i])) * (y[i + 1] - y[i]);
  });
}
