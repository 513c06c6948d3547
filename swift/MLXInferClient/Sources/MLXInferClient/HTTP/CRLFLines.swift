/// Collects bytes to lines that end in CR LF, wherever the bytes are split. Used for heads, chunk sizes and trailers.
struct CRLFLines: Sendable {
    private var line: [UInt8] = []
    private let limit: Int

    init(limit: Int) { self.limit = limit }

    /// Takes bytes from the front of `input`, up to the end of a line. Returns the line without its end, or nil where it is not complete.
    mutating func next(from input: inout ArraySlice<UInt8>) throws -> String? {
        while let byte = input.popFirst() {
            if byte == 0x0A {
                guard line.last == 0x0D else { throw HTTPFailure.malformed("a line that ends without CR") }
                defer { line.removeAll(keepingCapacity: true) }
                return try Self.text(line.dropLast())
            }
            if line.last == 0x0D { throw HTTPFailure.malformed("a CR inside a line") }
            guard line.count < limit else { throw HTTPFailure.malformed("a line longer than \(limit) bytes") }
            line.append(byte)
        }
        return nil
    }

    private static func text(_ bytes: ArraySlice<UInt8>) throws -> String {
        guard bytes.allSatisfy({ $0 >= 0x20 && $0 != 0x7F || $0 == 0x09 }) else {
            throw HTTPFailure.malformed("a control character in a line")
        }
        return String(decoding: bytes, as: UTF8.self)
    }
}
