/// The header fields of a response, in order; names are compared without regard to case.
struct Headers: Sendable, Equatable {
    struct Field: Sendable, Equatable {
        var name: String
        var value: String
    }

    var fields: [Field] = []

    /// The value of the first field of this name.
    subscript(name: String) -> String? { values(name).first }

    /// The values of all fields of this name.
    func values(_ name: String) -> [String] {
        fields.filter { $0.name == name.lowercased() }.map(\.value)
    }
}

/// The status line and header fields of a response.
struct ResponseHead: Sendable, Equatable {
    var status: Int
    var reason: String
    var fields = Headers()

    var succeeded: Bool { (200..<300).contains(status) }

    /// The media type without its parameters, in lower case.
    var contentType: String? {
        fields["content-type"].map { value in
            String(value.prefix { $0 != ";" }).lowercased().filter { $0 != " " && $0 != "\t" }
        }
    }
}
