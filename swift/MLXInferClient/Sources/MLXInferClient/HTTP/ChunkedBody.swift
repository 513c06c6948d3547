/// Decodes a body in chunked transfer coding (RFC 9112, section 7.1), fed with bytes split anywhere.
///
/// Extensions of chunks and trailers are read and dropped.
struct ChunkedBody: Sendable {
    private enum State: Equatable {
        case size
        case data(left: Int)
        case dataEnd, trailers, done
    }

    private var state = State.size
    private var lines = CRLFLines(limit: 4096)
    private var trailers = 0

    var isDone: Bool { state == .done }

    /// Takes bytes from the front of `input` and adds the data among them to `data`; stops behind the last chunk's trailers.
    mutating func decode(_ input: inout ArraySlice<UInt8>, into data: inout [UInt8]) throws {
        while !isDone, !input.isEmpty {
            switch state {
            case .size:
                guard let line = try lines.next(from: &input) else { break }
                let size = try Self.size(line)
                state = size == 0 ? .trailers : .data(left: size)
            case .data(let left):
                let part = input.prefix(left)
                data += part
                input.removeFirst(part.count)
                state = part.count == left ? .dataEnd : .data(left: left - part.count)
            case .dataEnd:
                guard let line = try lines.next(from: &input) else { break }
                guard line.isEmpty else { throw HTTPFailure.malformed("a chunk longer than its size") }
                state = .size
            case .trailers: try readTrailer(&input)
            case .done: break
            }
        }
    }

    private mutating func readTrailer(_ input: inout ArraySlice<UInt8>) throws {
        guard let line = try lines.next(from: &input) else { return }
        trailers += 1
        guard trailers <= 64 else { throw HTTPFailure.malformed("more than 64 trailers") }
        if line.isEmpty { state = .done }
    }

    private static func size(_ line: String) throws -> Int {
        let digits = line.prefix { $0 != ";" && $0 != " " && $0 != "\t" }
        let rest = line[digits.endIndex...].drop { $0 == " " || $0 == "\t" }
        guard (1...8).contains(digits.utf8.count), digits.utf8.allSatisfy({ Character(UnicodeScalar($0)).isHexDigit }),
            rest.isEmpty || rest.first == ";", let size = Int(digits, radix: 16)
        else { throw HTTPFailure.malformed("not the size of a chunk: \(line.prefix(40))") }
        return size
    }
}
