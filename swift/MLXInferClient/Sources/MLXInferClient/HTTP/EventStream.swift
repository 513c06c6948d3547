/// One event of a `text/event-stream`.
struct ServerSentEvent: Sendable, Equatable {
    /// The event's name; empty where it has none.
    var name = ""
    /// The data, lines joined by LF, as the bytes that came.
    var data: [UInt8] = []
}

/// Parses server-sent events (WHATWG HTML, section 9.2.6), fed with bytes split anywhere.
///
/// Comments, `id` and `retry` are read and dropped. An event that the end of the stream leaves without its empty line is handed out by
/// ``end()``, for the HTTP framing around it has already shown whether the stream is complete.
struct EventStream: Sendable {
    private let limit: Int
    private var line: [UInt8] = []
    private var event = ServerSentEvent()
    private var hasData = false
    private var afterCR = false
    private var isFirstLine = true

    /// - Parameter limit: the most bytes that a line, and an event's data, may have.
    init(limit: Int = 4 << 20) { self.limit = limit }

    /// Adds the events that these bytes complete.
    mutating func feed(_ bytes: some Sequence<UInt8>, into events: inout [ServerSentEvent]) throws {
        for byte in bytes {
            let followsCR = afterCR
            afterCR = byte == 0x0D
            if byte == 0x0A, followsCR { continue }
            if byte == 0x0A || byte == 0x0D {
                try endLine(&events)
            } else {
                guard line.count < limit else { throw HTTPFailure.malformed("a line of the stream has more than \(limit) bytes") }
                line.append(byte)
            }
        }
    }

    /// Adds the event that the end of the stream completes, if any.
    mutating func end(into events: inout [ServerSentEvent]) throws {
        if !line.isEmpty { try endLine(&events) }
        dispatch(&events)
    }

    private mutating func endLine(_ events: inout [ServerSentEvent]) throws {
        var text = line[...]
        if isFirstLine, text.starts(with: [0xEF, 0xBB, 0xBF]) { text = text.dropFirst(3) }
        isFirstLine = false
        if text.isEmpty {
            dispatch(&events)
        } else {
            try readField(text)
        }
        line.removeAll(keepingCapacity: true)
    }

    private mutating func readField(_ text: ArraySlice<UInt8>) throws {
        let name = text.prefix { $0 != UInt8(ascii: ":") }
        var value = text.dropFirst(name.count + 1)
        if value.first == UInt8(ascii: " ") { value = value.dropFirst() }
        if name.elementsEqual("data".utf8) {
            guard event.data.count + value.count < limit else { throw HTTPFailure.malformed("an event has more than \(limit) bytes") }
            if hasData { event.data.append(0x0A) }
            event.data += value
            hasData = true
        } else if name.elementsEqual("event".utf8) {
            event.name = String(decoding: value, as: UTF8.self)
        }
    }

    private mutating func dispatch(_ events: inout [ServerSentEvent]) {
        if hasData { events.append(event) }
        event = ServerSentEvent()
        hasData = false
    }
}
