// Versions of a message or an answer, each with all that followed it. The shown turns are one path through them. The first turn of a fork
// has `branches`: { at, tails }, where `tails[at]` is null, for the shown one, and the others are lists of turns.

/** Puts `turn` in the place of the turns from this index on, which become another version. Turns without any text are dropped. */
export function fork(turns, at, turn) {
  const tail = turns.splice(at, turns.length, turn);
  const branches = tail[0].branches ?? { at: 0, tails: [null] };
  delete tail[0].branches;
  if (tail.some((one) => one.content || one.reasoning || one.images || one.files || one.calls?.length)) {
    branches.tails[branches.at] = tail;
    branches.at = branches.tails.push(null) - 1;
  }
  if (branches.tails.length > 1) turn.branches = branches;
}

/** Shows version `number` of the turn at this index, and what followed that version. */
export function choose(turns, at, number) {
  const { branches } = turns[at];
  if (!branches?.tails[number]) return;
  const tail = turns.splice(at, turns.length, ...branches.tails[number]);
  delete tail[0].branches;
  branches.tails[branches.at] = tail;
  branches.tails[number] = null;
  branches.at = number;
  turns[at].branches = branches;
}

/** All turns, also those of versions that are not shown. */
export function everyTurn(turns) {
  return turns.flatMap((turn) => [turn, ...(turn.branches?.tails ?? []).flatMap((tail) => (tail ? everyTurn(tail) : []))]);
}

/** The turns that `plain(turn)` allows, at every fork. Anything else that is no fork is left out. */
export function cleaned(turns, plain) {
  return turns.filter(plain).map(({ branches, ...turn }) => {
    const tails = Array.isArray(branches?.tails) ? branches.tails.map((tail, i) => (i === branches.at || !Array.isArray(tail) ? null : cleaned(tail, plain))) : [];
    const kept = tails.filter((tail, i) => i === branches.at || tail?.length);
    const at = kept.indexOf(null);
    return kept.length > 1 && at >= 0 ? { ...turn, branches: { at, tails: kept } } : turn;
  });
}
