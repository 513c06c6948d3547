/// Numbers that look random and are the same each time.
struct Dice: RandomNumberGenerator {
    private var state: UInt64

    init(seed: UInt64) { state = seed }

    mutating func next() -> UInt64 {
        state &+= 0x9E37_79B9_7F4A_7C15
        var mixed = state
        mixed = (mixed ^ (mixed >> 30)) &* 0xBF58_476D_1CE4_E5B9
        mixed = (mixed ^ (mixed >> 27)) &* 0x94D0_49BB_1331_11EB
        return mixed ^ (mixed >> 31)
    }
}

/// The ways in which a test splits bytes: not at all, at every place, into single bytes, and at random.
func splits(of count: Int, random: Int = 50) -> [[Int]] {
    var dice = Dice(seed: UInt64(count))
    let scattered = (0..<random).map { _ in
        (0..<Int.random(in: 2...8, using: &dice)).map { _ in Int.random(in: 0...count, using: &dice) }.sorted()
    }
    return [[], Array(0...count)] + (1..<max(count, 2)).map { [$0] } + scattered
}

/// The pieces between the cuts.
func pieces(of bytes: [UInt8], cut cuts: [Int]) -> [ArraySlice<UInt8>] {
    let ends = cuts.filter { $0 <= bytes.count } + [bytes.count]
    return zip([0] + ends, ends).map { bytes[$0..<max($0, $1)] }
}

extension String {
    var bytes: [UInt8] { Array(utf8) }
}
