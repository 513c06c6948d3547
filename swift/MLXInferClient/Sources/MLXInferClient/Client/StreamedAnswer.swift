/// Translates the events of a stream, whose end is `[DONE]`, to what the package hands out.
protocol EventReader {
    associatedtype Output
    /// The text so far.
    var partial: String { get }
    /// True once the answer has said how it ended.
    var isFinished: Bool { get }
    /// Adds what an event's data stands for.
    mutating func read(_ data: [UInt8], into output: inout [Output]) throws
}

/// Reads an answer of server-sent events; an answer with a status of failure is collected and thrown as the server's error.
struct StreamedAnswer<Events: EventReader>: AnswerReader {
    private var parser = ResponseParser()
    private var stream = EventStream()
    private var events: Events
    private var refusal: WholeAnswer?
    private var requestID: String?
    private(set) var isComplete = false

    var partial: String { events.partial }

    init(_ events: Events) { self.events = events }

    mutating func feed(_ bytes: ArraySlice<UInt8>, into output: inout [Events.Output]) throws {
        var parts: [ResponseParser.Part] = []
        let result = Result { try parser.feed(bytes, into: &parts) }
        try take(parts, into: &output)
        try result.get()
    }

    mutating func end(into output: inout [Events.Output]) throws {
        var parts: [ResponseParser.Part] = []
        try parser.end(into: &parts)
        try take(parts, into: &output)
    }

    private mutating func take(_ parts: [ResponseParser.Part], into output: inout [Events.Output]) throws {
        for part in parts where !isComplete {
            if case .head(let head) = part { try begin(head) }
            guard refusal == nil else {
                var none: [[UInt8]] = []
                try refusal?.take([part], into: &none)
                continue
            }
            var arrived: [ServerSentEvent] = []
            switch part {
            case .head: break
            case .body(let bytes):
                let result = Result { try stream.feed(bytes, into: &arrived) }
                try read(arrived, into: &output)
                try result.get()
            case .end:
                try stream.end(into: &arrived)
                try read(arrived, into: &output)
                try finish()
            }
        }
    }

    private mutating func begin(_ head: ResponseHead) throws {
        requestID = head.fields["x-request-id"]
        if !head.succeeded {
            refusal = WholeAnswer(limit: 1 << 20)
        } else if head.contentType != "text/event-stream" {
            throw HTTPFailure.malformed("a stream of events was asked for, and \(head.contentType ?? "no content type") came")
        }
    }

    private mutating func read(_ arrived: [ServerSentEvent], into output: inout [Events.Output]) throws {
        for event in arrived where !isComplete {
            if event.data.elementsEqual("[DONE]".utf8) {
                try finish()
            } else {
                try read(event, into: &output)
            }
        }
    }

    private mutating func read(_ event: ServerSentEvent, into output: inout [Events.Output]) throws {
        do {
            try events.read(event.data, into: &output)
        } catch MLXInferError.api(var error) {
            error.requestID = requestID
            throw MLXInferError.api(error)
        }
    }

    private mutating func finish() throws {
        guard !isComplete else { return }
        isComplete = true
        guard events.isFinished else { throw HTTPFailure.truncated("the stream ended before the answer did") }
    }
}
