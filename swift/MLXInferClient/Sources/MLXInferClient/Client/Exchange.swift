/// Makes sense of the bytes of one answer, wherever they are split.
protocol AnswerReader {
    associatedtype Output
    /// True once nothing more is needed from the connection.
    var isComplete: Bool { get }
    /// The text so far, for errors that end it.
    var partial: String { get }
    /// Adds what these bytes complete; also where it throws.
    mutating func feed(_ bytes: ArraySlice<UInt8>, into output: inout [Output]) throws
    /// The same for the end of the connection.
    mutating func end(into output: inout [Output]) throws
}

/// Sends a request and reads its answer, on the thread that calls. Connects again as ``Reconnect`` allows.
struct Exchange {
    let endpoint: Endpoint
    let timeouts: Timeouts
    let reconnect: Reconnect
    let waker: Waker

    /// Why an attempt failed, and whether the request could have had an effect.
    private struct Failure: Error {
        enum Stage { case connecting, unanswered, answered }
        let error: MLXInferError
        let stage: Stage
    }

    /// Hands what `reader` makes of the answer to `emit`, piece by piece.
    func run<Reader: AnswerReader>(_ request: Request, with reader: Reader, emit: (Reader.Output) -> Void) throws {
        let bytes = try request.bytes(host: endpoint.hostHeader, apiKey: endpoint.apiKey)
        let start = WaitClock.now
        let deadline = timeouts.wholeAnswer.map { start + $0 }
        var pause = reconnect.firstPause
        var resent = false
        while true {
            do {
                return try attempt(bytes, reader, deadline, emit)
            } catch let failure as Failure {
                let mayRetry = failure.stage == .connecting || (failure.stage == .unanswered && !resent)
                let next = WaitClock.now + pause
                guard mayRetry, next <= start + reconnect.upTo, deadline.map({ next < $0 }) ?? true else { throw failure.error }
                resent = resent || failure.stage == .unanswered
                _ = try waker.wait(until: next)
                pause = min(pause * 2, reconnect.longestPause)
            }
        }
    }

    private func attempt<Reader: AnswerReader>(
        _ bytes: [UInt8], _ reader: Reader, _ deadline: WaitClock.Instant?, _ emit: (Reader.Output) -> Void
    ) throws {
        try waker.check()
        let connection = try connect(deadline)
        var reader = reader
        var received = 0
        do {
            do {
                try connection.send(bytes, patience: timeouts.silence, deadline: deadline)
            } catch let broken as Connection.Broken where broken.isClosedByPeer {
                // A server that refuses a request may answer and close before it has read all of it.
            }
            var buffer = [UInt8](repeating: 0, count: 64 << 10)
            while !reader.isComplete {
                let count = try connection.receive(into: &buffer, patience: timeouts.silence, deadline: deadline)
                received += count
                var output: [Reader.Output] = []
                defer { output.forEach(emit) }
                try count > 0 ? reader.feed(buffer[..<count], into: &output) : reader.end(into: &output)
                if count == 0 { break }
            }
        } catch {
            throw Self.failure(error, received, reader.partial)
        }
    }

    private func connect(_ deadline: WaitClock.Instant?) throws -> Connection {
        let limit = WaitClock.now + timeouts.connection
        do {
            return try Connection(to: endpoint, waker: waker, deadline: deadline.map { min($0, limit) } ?? limit)
        } catch let error as MLXInferError {
            switch error {
            case .serverNotRunning, .connectionFailed: throw Failure(error: error, stage: .connecting)
            default: throw error
            }
        }
    }

    /// What an error means for whoever waits for the answer.
    private static func failure(_ error: any Error, _ received: Int, _ partial: String) -> any Error {
        let reason: String
        switch error {
        case HTTPFailure.malformed(let text): return MLXInferError.protocolViolation(text)
        case MLXInferError.timedOut(let waiting, _): return MLXInferError.timedOut(waiting, partial: partial)
        case HTTPFailure.truncated(let text): reason = text
        case let broken as Connection.Broken: reason = broken.reason
        default: return error
        }
        return Failure(error: .streamInterrupted(partial: partial, reason: reason), stage: received == 0 ? .unanswered : .answered)
    }
}
